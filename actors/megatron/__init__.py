"""The student on Megatron-Core: model, conversion, step, checkpoint and export of one rank."""
