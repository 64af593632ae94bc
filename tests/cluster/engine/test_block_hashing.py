"""Texts of blocks: what makes them equal, and that their hashes are stable."""

from cluster.engine.block_hashing import BlockText, digest, next_text, root_text, same_text


def chain(*blocks: tuple[int, ...], fields: dict[str, str] | None = None) -> BlockText:
    text = root_text(fields or {})
    for block in blocks:
        text = next_text(text, block)
    return text


def test_a_text_is_all_its_tokens_in_order() -> None:
    assert same_text(chain((1, 2), (3, 4)), chain((1, 2), (3, 4)))
    assert chain((1, 2), (3, 4)).hash == chain((1, 2), (3, 4)).hash
    others = [chain((3, 4), (1, 2)), chain((3, 4)), chain((1, 2)), chain((0, 2), (3, 4)), chain((1, 2), (3, 5))]
    assert not any(same_text(chain((1, 2), (3, 4)), other) for other in others)
    assert len({text.hash for text in others}) == len(others)


def test_case_44_fields_are_told_apart_by_name_and_by_value() -> None:
    roots = [
        {},
        {"cache_salt": ""},
        {"cache_salt": "X"},
        {"adapter": "X"},
        {"adapter": "", "cache_salt": "X"},
        {"adapter": "X", "cache_salt": ""},
        {"adapter": "Xcache_salt"},
        {"cache_salt": "Y"},
    ]
    texts = [chain((1, 2), fields=fields) for fields in roots]
    assert len({text.hash for text in texts}) == len(roots)
    for index, text in enumerate(texts):
        assert [same_text(text, other) for other in texts] == [index == at for at in range(len(roots))]
    both = {"cache_salt": "X", "adapter": "Y"}
    assert same_text(chain(fields=both), chain(fields=dict(reversed(both.items()))))


def test_hashes_are_the_same_in_every_process() -> None:
    assert digest(b"").hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert (
        chain((1, 2), fields={"cache_salt": "X"}).hash.hex()
        == "4a63a638c19f63d927de105c4ebc17561fb4152b3ef823659ae746958bf919be"
    )


def test_equal_hashes_do_not_make_equal_texts() -> None:
    root = root_text({}, lambda _: b"same")
    one, other = (next_text(root, tokens, lambda _: b"same") for tokens in ((1,), (2,)))
    assert one.hash == other.hash
    assert not same_text(one, other)
    assert not same_text(next_text(one, (3,)), next_text(other, (3,)))


def test_a_long_text_is_compared_shown_and_freed_without_recursion() -> None:
    long, again = (chain(*((number,) for number in range(20_000))) for _ in range(2))
    assert same_text(long, again)
    assert "content=(19999,)" in repr(long)
