"""GPT-2's spelling of bytes as characters, which byte-level vocabularies are written in."""


def _characters() -> dict[int, str]:
    """Printable Latin-1 stands for itself, the others for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


CHARACTER_OF_BYTE = _characters()
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
