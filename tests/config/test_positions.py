import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.config.positions import positions

TEXT = '''# comment = 1
a = 1
"q.k" = "x#]\\"y"
[t]  # [not.this]
b.c = [1, [2, 3], # inside
 { z = 1, y = "}" } ]
s = """
[not]
x = 1 ""quoted"""""
l = \'\'\'a'b\'\'\'
[[r]]
n = 1
[r.p]
q = 2024-01-01 00:00:00
[[r]]
'n' = 2
[[r.sub]]
m = 3
[[r.sub]]
  m = 4
'''


def paths(value, path=()):
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def test_positions_of_a_worked_example():
    found = positions(TEXT)
    assert found["q.k",] == (3, 1)
    assert found["t", "b", "c"] == (5, 3)
    assert found["t", "b", "c", 1, 0] == (5, 12)
    assert found["t", "b", "c", 2, "y"] == (6, 11)
    assert found["t", "l"] == (10, 1)
    assert found["r", 0, "p", "q"] == (14, 1)
    assert found["r", 1, "n"] == (16, 1)
    assert found["r", 1, "sub", 1, "m"] == (20, 3)


def test_every_value_has_a_position():
    assert set(positions(TEXT)) == set(paths(tomli.loads(TEXT)))


def test_windows_line_ends_change_nothing():
    assert positions(TEXT.replace("\n", "\r\n")) == positions(TEXT)


scalars = st.one_of(
    st.integers(-9, 9).map(str),
    st.booleans().map(lambda value: str(value).lower()),
    st.text("ab#[]{}=,.\"'\\ ", max_size=6).map(lambda text: tomli_string(text)),
    st.text('ab#[]{}=,." ', max_size=6).map(lambda text: f"'{text}'"),
)


def tomli_string(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[ {', '.join(items)} ]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{ " + ", ".join(f"k{i} = {v}" for i, v in enumerate(items)) + " }"
        ),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100)
@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_any_document_that_tomli_reads_is_located(first, second):
    lines = [f"key{i} = {value}" for i, value in enumerate(first)]
    lines += ["[[list]]", *(f"a{i}.b = {value} # end" for i, value in enumerate(second)), "[[list]]"]
    text = "\n".join(lines)
    found = positions(text)
    assert set(found) == set(paths(tomli.loads(text)))
    for i in range(len(first)):
        assert found[f"key{i}",] == (i + 1, 1)
