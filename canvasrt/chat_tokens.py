"""The control tokens of the model's chat format. Imports nothing."""

THOUGHT, THOUGHT_END = "<|channel>", "<channel|>"
CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
TURN_END = "<turn|>"
CONTROL_TOKENS = (THOUGHT, THOUGHT_END, CALL, CALL_END, QUOTE)
# Inserted in decoded text before the last character of a control token's spelling that ordinary tokens wrote. Text
# never needs this noncharacter.
FORGED = "\ufdd0"
