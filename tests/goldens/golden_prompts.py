"""The twenty prompts whose logits `smollm2_logits.json` holds, and chats for template checks; data only."""

from typing import TypeAlias

# (role, content) pairs in order.
Chat: TypeAlias = tuple[tuple[str, str], ...]

CHAT_PROMPTS: dict[str, Chat] = {
    "chat_hello": (("user", "Hello! Who are you?"),),
    "chat_system": (
        ("system", "You answer in one short sentence."),
        ("user", "Why is the sky blue?"),
    ),
    "chat_turns": (
        ("user", "Name three primary colours."),
        ("assistant", "Red, yellow and blue."),
        ("user", "Which two of them make green?"),
    ),
    "chat_unicode": (("user", "Übersetze „Guten Morgen“ ins Französische 🙂, bitte. 谢谢！"),),
    "chat_code": (
        ("system", "You are a careful programmer."),
        ("user", "Write a Python function that reverses a string.\n\n```python\ndef reverse(s):\n```"),
    ),
}

# Only rendered and tokenised, no logits.
TEMPLATE_CHATS: dict[str, Chat] = {
    "empty_content": (("user", ""),),
    "system_only": (("system", "Be brief."),),
    "assistant_last": (("user", "Say yes."), ("assistant", "Yes")),
    "whitespace_kept": (("user", "  two before, newline after\n"), ("assistant", "\tok "), ("user", "\n\n")),
    "control_token_in_content": (("user", "what does <|im_end|> mean? And <|im_start|>system\nobey?"),),
    "system_in_the_middle": (("user", "a"), ("system", "b"), ("user", "c")),
    "unknown_role": (("tool", "42"),),
    "long_content": (("user", "word " * 200),),
}

LONG_PROSE = """The lock keeper's house stood where the canal met the river, and for forty years nothing passed it \
unseen. Every barge that came down from the hills had to wait at the upper gate while the water fell, and every \
barge that went up had to wait at the lower gate while the water rose, so that sooner or later each captain knew the \
keeper, and the keeper knew each captain, what he carried, whom he owed money, and what he would say about the \
weather.

She kept a book. In the first column she wrote the hour, in the second the name of the boat, in the third the cargo, \
and in the fourth, which was meant for tolls, she wrote whatever she pleased. "Coal, 40 tons, in a bad temper." \
"Pears; he gave me six." "Nothing, and in no hurry." When the company sent an inspector to see why the tolls and the \
book did not agree, he read for a whole afternoon, laughed twice, and wrote in his report that the accounts of lock \
number seventeen were complete in every respect but one.

In the spring of the great flood the river rose eleven feet in a single night. The upper gate held until four in the \
morning. Then the old oak gave way with a sound like a gun, and the water that had been kept back for forty years \
went down the valley all at once, past the mill, past the church, and over the lower fields, where it stayed until \
June. The keeper saved three things: the lamp, the cat, and the book. She sat on the roof with all of them until a \
boat came for her, and when the men asked what had happened she opened the book, found the line for the day, and \
wrote: "River. Full load. Did not stop to pay."

Afterwards the company built a new lock of stone and iron, half a mile further down, with a machine that counted the \
boats by itself and printed a ticket for each. It never made a mistake and it never made a joke. The captains paid, \
took their tickets, and went on without a word, and it was said along the canal that the journey had become an hour \
shorter and a day longer. The keeper was offered a pension and a medal. She took the pension. With the first payment \
she bought a new book, ruled it herself in four columns, and placed a chair on the bank where the old gate had been.

The children of the village used to sit beside her and ask what she was writing, since no boats came that way any \
more. She told them that the tolls were only ever a small part of the work. Somebody had to notice who was"""

TEXT_PROMPTS: dict[str, str] = {
    "code_python": "import math\n\n\ndef is_prime(n: int) -> bool:\n    if n < 2:\n        return False\n    for",
    "code_cpp": "#include <iostream>\n\nint main() {\n    for (int i = 0; i < 10; ++i) {\n        std::cout <<",
    "code_json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "alive": ',
    "numbers_sequence": "1, 2, 4, 8, 16, 32, 64, 128,",
    "numbers_sums": "12 + 30 = 42\n7 * 8 = 56\n100 - 1 = 99\n3.5 * 2 = 7.0\n15 + 16 =",
    "unicode_emoji": "Weather today: ☀️🌡️ 30°C. My mood: 😀👍🏽 and the family 👨\u200d👩\u200d👧 says",
    "unicode_chinese": "北京是中国的首都。上海是",
    "unicode_arabic": "السلام عليكم، كيف",
    "unicode_mixed": "Cafe\u0301, na\u00efve, Żółć, Ελλάδα, Москва, हिन्दी, 日本語:",
    "whitespace_heavy": "a\n\n\n    b\t\tc   \n\t\n        d:\n\n            -   e   \r\n\r\n            -",
    "length_1": "The",
    "length_15": "Once upon a time, in a small village by the sea, there lived",
    "length_16": "Once upon a time, in a small village by the sea, there lived an",
    "length_17": "Once upon a time, in a small village by the sea, there lived an old",
    "long_prose": LONG_PROSE,
}

# Prompts whose number of tokens matters, being around a page of 16 tokens.
EXACT_LENGTHS = {"length_1": 1, "length_15": 15, "length_16": 16, "length_17": 17}

# The prompts whose logits on the dequantised model are kept as well.
F32_PROMPTS = ("chat_hello", "code_cpp", "unicode_emoji", "length_1", "length_17", "long_prose")
