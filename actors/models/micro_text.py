"""Text that the micro models' tokenizer is trained on: kept here so that it never changes."""

CORPUS = (
    "The river runs past the mill and under the old stone bridge. In the morning the children "
    "walk along the water to the school, and in the evening they walk back and tell each other "
    "what they have learned. The miller knows all of them by name. When it rains, he opens the "
    "door and lets them wait between the sacks of flour until the sky is clear again.",
    "What is the answer to the question? The answer is that there is more than one answer. "
    "Which of them is right depends on what was asked, on who asked it and on what was known at "
    "the time. A good question names the things that it is about, and a good answer says how "
    "certain it is and what would show that it is wrong.",
    "To make bread you need flour, water, salt and a little yeast. Mix them in a bowl, work the "
    "dough with both hands until it is smooth, cover it and let it rest for an hour. Then form a "
    "loaf, let it rise once more and bake it until the crust is brown. Let it cool before you "
    "cut it, even if that is the hardest part of all.",
    "A teacher shows the student how the work is done. The student tries, and the teacher says "
    "where the try was good and where it was not. After many tries the student does what the "
    "teacher would have done, and sometimes finds a way that the teacher did not know.",
    "def add(first, second):\n    return first + second\n\n\nfor number in range(10):\n"
    "    if number % 2 == 0:\n        print(number, add(number, 1))\n",
    "12 + 7 = 19, 3 * 4 = 12, 100 - 25 = 75 and 81 / 9 = 9. The sum of 1, 2 and 3 is 6. "
    "If each of 5 boxes holds 8 apples, there are 40 apples in all.",
    "The sun is a star. The earth turns around the sun in one year and around itself in one day. "
    "The moon turns around the earth in about four weeks. Light from the sun needs about eight "
    "minutes to reach us, and light from the next star needs more than four years.",
    "Please write a short list of things to do before the winter: close the windows of the "
    "summer house, bring the plants inside, clean the tools and put them where they will be "
    "found again, stack the wood, and thank the neighbours for their help.",
)
