"""What a person sees: progress while it runs, a page and a plot at the end."""
