"""The texts on which the Go tokenizer is compared with the reference. Same seed, same texts."""

import pathlib
import random
import sysconfig
import unicodedata

SENTENCES = [
    "Hello, world!", "The quick brown fox jumps over the lazy dog.", "Où est la bibliothèque ? C'est là-bas…",
    "Größe: 5 m² – Straße, ÄÖÜß", "¿Dónde está el baño? ¡Allí!", "Привет, мир! Как дела?", "Γειά σου Κόσμε ἀρχὴ",
    "שלום עולם, מה שלומך?", "مرحبا بالعالم، كيف حالك؟", "नमस्ते दुनिया, आप कैसे हैं?", "สวัสดีชาวโลก สบายดีไหม",
    "こんにちは世界。お元気ですか？カタカナﾊﾝｶｸ", "你好，世界！今天天气怎么样？繁體中文", "안녕하세요 세계! 잘 지내세요?",
    "Xin chào thế giới, bạn khỏe không?", "হ্যালো বিশ্ব", "வணக்கம் உலகம்", "မင်္ဂလာပါ ကမ္ဘာလောက", "ជំរាបសួរ​ពិភពលោក",
    "გამარჯობა მსოფლიო", "Բարեւ աշխարհ", "ሰላም ልዑል", "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ", "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ", "བོད་སྐད་",
    "İstanbul'da ışık ŞEKER", "Þetta er íslenska ðæö", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓢𝓬𝓻𝓲𝓹𝓽 ℵ₀ ∑∫√∞≠≤", "𒀀𒀁𐍈𐎀𓀀",
    "ﬁﬂ ﬀ Ⅷ ⅷ ㎏ ㍿ ™ ① ½ ³", "Ａｂｃ１２３ fullwidth", "Zalgo: H̷̢̛e̵͜͡ l̴̨̛l̵͘͢o", "Ǆ ǅ ǆ ǈ title-case", "ſtraße ſ's K Å",
    "de\u0301compose\u0301 e\u0300\u0301 q\u0307\u0323", "가나다 \u1100\u1161\u11a8 jamo",
]
BLOCKS = [
    (0x20, 0x7F), (0xA0, 0x24F), (0x250, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0xFFF),
    (0x1000, 0x139F), (0x13A0, 0x18AF), (0x1E00, 0x1FFF), (0x2000, 0x206F), (0x2070, 0x23FF), (0x2460, 0x27BF),
    (0x2E80, 0x30FF), (0x3100, 0x33FF), (0x3400, 0x9FFF), (0xA000, 0xABFF), (0xAC00, 0xD7A3), (0xF900, 0xFDFF),
    (0xFE00, 0xFFEF), (0x10000, 0x10FFF), (0x11000, 0x13FFF), (0x16800, 0x18CFF), (0x1D000, 0x1D7FF),
    (0x1E000, 0x1EFFF), (0x1F000, 0x1FBFF), (0x20000, 0x323AF), (0xE0000, 0xE01EF),
]
EMOJI = [
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇺🇸", "🇩🇪🇫🇷", "❤️", "☺︎", "1️⃣", "#️⃣", "🧑🏿‍💻", "👨‍❤️‍💋‍👨", "🫠", "🪿", "\u200d", "\ufe0f",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "™️", "⌚",
]
SPACES = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n", "\u00a0", "\u3000", "\u2028", "\u2029", "\x85", "\x0b", "\x0c",
    "\u200b", "\u180e", "\ufeff", "\u2003", "\u202f", "\u205f", "\x1c", "\x1f", "\u1680",
]
NUMBERS = [
    "0", "12", "123", "1234", "12345678901234567890", "3.14159", "1,000,000", "-5", "+7", "1e10", "0x1F", "٣٤٥", "१२३",
    "１２３", "½", "²³", "Ⅷ", "①②", "2024-01-31", "12:34:56", "$5.00", "50%", "1st", "a1b2c3", "𝟙𝟚𝟛", "༣", "㊿", "৪৫৬",
]
CONTRACTIONS = [
    "I'm", "don't", "we'll", "you've", "they're", "he'd", "it's", "IT'S", "DON'T", "WE'LL", "O'Neil", "rock'n'roll",
    "'tis", "'S", "'ſ", "'ſt", "’s", "it’s", "'re", "'RE", "'vE", "y'all'd've", "l'été", "'ll'll", "''s", "K's", "'K", "'İ",
]
MARKUP = [
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>",
    "</think>", "<tool_call>", "</tool_call>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>", "<|channel|>", "<｜begin▁of▁sentence｜>", "<｜User｜>",
    "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜fim▁hole｜>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<unused0>",
    "<image_soft_token>", "\n\n\n\n", "▁▁▁", "▁", "<table>", "</h1>", "[multimodal]", "<|", "|>", "<|im_", "<th", "<｜",
    "<|bos|>", "<|eos|>", "<|extra_0|>", "<0x41>", "hello", "tokens", "[L]", "[R]", "[LR]",
]
WORDS = ["hello", "user", "assistant", ".", " ", "\n", "  ", "x", "you are", "1", "é", "你好", "'s", "\t", " the", "<", ">", "_"]
BAD_BYTES = [
    b"\xff", b"\xc3(", b"\xe2\x82", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80", b"a\x80b", b"\xf8\x88\x80\x80\x80",
    b"\xe2\x28\xa1", b"ok\xf0\x90", b"\xf4\x90\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf", b"\xe2\x82\xe2\x82\xac",
]


def code_samples(rng):
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parts = []
    for path in sorted(folder.glob("*.py"))[:40]:
        parts += path.read_text(encoding="utf8", errors="ignore").split("\n\n")
    rng.shuffle(parts)
    return [p[:500] for p in parts[:250]] + [
        "for(int i=0;i<n;++i){\n\tif(a[i]!=b[i])return -1;\n}", '<div class="x">&nbsp;</div>\n<!-- c -->',
        "SELECT * FROM t WHERE a='b' AND c<>\"d\";", "\\frac{a}{b}\\sum_{i=0}^{n} $x^2$",
        "https://a.b.c/d?e=f&g=%20h#i", 'a\\nb\\t"c"\\u00e9',
    ]


def random_chars(rng, block):
    codes = (rng.randint(*block) for _ in range(rng.randint(3, 25)))
    return "".join(chr(c) for c in codes if not 0xD800 <= c <= 0xDFFF)


def mixtures(rng, count, length, choices):
    return ["".join(c() for c in rng.choices(choices, k=rng.randint(1, length))) for _ in range(count)]


def texts():
    """Yields (kind, bytes); some are no UTF-8."""
    rng = random.Random(1234)
    pick = rng.choice
    out = []

    def add(kind, *strings):
        out.extend((kind, s.encode("utf8")) for s in strings)

    for s in SENTENCES:
        add("sentence", s, " " + s, s + " ", s.upper())
        add("normal form", *(unicodedata.normalize(f, s) for f in ("NFC", "NFD", "NFKD")))
    add("sentence", *(pick([" ", "", ", ", "\n", "  "]).join(rng.sample(SENTENCES, rng.randint(2, 5))) for _ in range(150)))
    for block in BLOCKS:
        add("block", *(random_chars(rng, block) for _ in range(10)))
    add("block", *(random_chars(rng, pick(BLOCKS)) + random_chars(rng, pick(BLOCKS)) for _ in range(80)))
    add("emoji", *mixtures(rng, 150, 12, [lambda: pick(EMOJI), lambda: pick(EMOJI) * rng.randint(1, 4), lambda: pick(WORDS)]))
    add("space", *mixtures(rng, 250, 10, [lambda: pick(SPACES), lambda: pick(SPACES) * rng.randint(1, 9), lambda: pick(WORDS)]))
    for n in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 64, 100, 255):
        add("space", " " * n, "a" + " " * n + "b", "\n" * n, "\t" * n + "x", " " * n + "\n")
    add("number", *(pick(["", " ", ", ", "\n", "_"]).join(rng.choices(NUMBERS, k=rng.randint(1, 7))) for _ in range(150)))
    add("contraction", *(pick(["", " ", "  ", "\n", "."]).join(rng.choices(CONTRACTIONS, k=rng.randint(1, 8))) for _ in range(150)))
    add("code", *code_samples(rng))
    add("markup", *mixtures(rng, 400, 10, [lambda: pick(MARKUP), lambda: pick(WORDS), lambda: pick(WORDS) + " "]))
    for s in MARKUP:
        add("markup", s, " " + s + " ", "a" + s + "b", s + s, s.upper(), s[:-1], "\n " + s + " \n" + s)
    add("control", *("a" + chr(c) + "b" + chr(c) for c in [*range(32), 127]), "", "\0", "\0\0abc\0")
    add("marks", *("e" + "\u0301" * n + "\u0323" * n + "x" for n in (5, 15, 16, 20, 40)), "\u0344" * 20, "\u1ec7\u0301" * 20)
    add("long", "a" * 4000, " " * 4000, "ab" * 3000, "0" * 3000, "你好" * 1500, "!?" * 1500, "\n " * 1500, "é" * 2000, "😀" * 1000)
    whole = [b for _, b in out]
    for _ in range(400):
        parts = [pick(whole)[:60] if rng.random() < 0.8 else pick(MARKUP).encode() for _ in range(rng.randint(2, 6))]
        out.append(("mixture", b"".join(parts).decode("utf8", "ignore").encode("utf8")))
    for _ in range(120):
        b = bytearray((pick(SENTENCES) + pick(EMOJI)).encode("utf8"))
        for _ in range(rng.randint(1, 4)):
            b[rng.randrange(len(b))] = rng.randrange(256)
        out.append(("not utf-8", bytes(b[: rng.randrange(1, len(b))]) if rng.random() < 0.3 else bytes(b)))
    for b in BAD_BYTES:
        out += [("not utf-8", b), ("not utf-8", b"x " + b + b" y")]
    seen = set()
    for kind, b in out:
        if b not in seen:
            seen.add(b)
            yield kind, b


def sweep_codes():
    """The code points of the Unicode sweep: all of planes 0 to 3 that may be assigned, the large uniform blocks thinned."""
    for c in range(0x323B0):
        if 0xD800 <= c < 0xF900:
            continue
        compatibility = 0x2F800 <= c < 0x2FA20
        large = 0x3400 <= c < 0xA000 or 0xAC00 <= c < 0xD7A0 or c >= 0x20000 and not compatibility
        if not large or c % 16 == 0:
            yield c
    yield from range(0xE0000, 0xE0200)


def sweep_text(code):
    c = chr(code)
    return f"a{c}a 1{c}1 {c}{c}\n{c} .{c}"
