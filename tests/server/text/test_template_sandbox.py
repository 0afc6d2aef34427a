"""Templates whose work grows without a bound end with an error."""

from __future__ import annotations

import gc
import time
import tracemalloc
from contextlib import suppress

import jinja2
import pytest

from server.text.template_sandbox import RenderClock, StepTooLongError, TemplateEnvironment

LIMIT_S = 0.1
MAX_MEMORY_BYTES = 64 << 20
GROWING = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop's condition": "{% for i in range(99999) if range(9999) | max < 0 %}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive blocks": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
}
STEPS = [
    *(("n.x ~ n.x", "'x'"), ("n.x + n.x", "'x'"), ("n.x + n.x", "[1]"), ("n.x * 2", "'x'"), ("n.x * 3", "[1]")),
    *(("n.x * n.x", "3"), ("n.x ** 9", "3"), ("9 ** (9 ** n.x)", "9"), ("3 * n.x", "(1,)")),
    *(("'%s%s' % (n.x, n.x)", "'x'"), ("'%999999999d' % n.x", "1"), ("'%*d' % (999999999, n.x)", "1")),
]
for _step, _start in STEPS:
    _loop = f"{{% for i in range(60) %}}{{% set n.x = {_step} %}}{{% endfor %}}"
    GROWING[f"{_step} from {_start}"] = f"{{% set n = namespace(x={_start}) %}}{_loop}"


_DOUBLED = "{%% set n = namespace(x=%s) %%}{%% for i in range(40) %%}{%% set n.x = %s %%}{%% endfor %%}"
_NESTED = _DOUBLED % ("[1]", "[n.x, n.x]")
_TUPLES = _DOUBLED % ("(1,)", "(n.x, n.x)")
_LONG = "{% set t = 'aB ' * 40000 %}"
_MANY = "{% set l = (range(5000) | map('string') | list) %}{% set l = l + l[:4000] %}"
_PAIRS = (
    "{% set n = namespace(x=[()]) %}{% for i in range(8) %}{% set m = namespace(y=[]) %}{% for a in n.x %}"
    "{% set m.y = m.y + [(-1, a), (-2, a)] %}{% endfor %}{% set n.x = m.y %}{% endfor %}"  # equal hashes
)
_DEEP = _DOUBLED % ("range(5000) | list", "[n.x]")
_DICT = "{% set d = {}.fromkeys(range(4000), 'x') %}"
HOSTILE = {
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "a sort of 500,000 numbers": "{% set l = (range(100000) | list) * 5 %}{{ l | sort | length }}",
    "nested lists as a text": _NESTED + "{{ n.x | string }}",
    "nested lists as JSON": _NESTED + "{{ n.x | tojson }}",
    "nested lists are compared": _NESTED + "{% set a = n.x %}" + _NESTED + "{{ a == n.x }}",
    "nested tuples as a key": _TUPLES + "{{ {n.x: 1} | length }}",
    "a text joins letters": _LONG + "{{ t.join(t) | length }}",
    "an indent": "{% set t = '\\n' * 60000 %}{{ t | indent(4000) | length }}",
    "JSON with an indent": _MANY + "{{ l | tojson(indent=1000000000) }}",
    "keys of a long text": _LONG + "{% set d = {}.fromkeys(range(4000), t) %}{{ d | string | length }}",
    "JSON of the greatest depth": _DEEP.replace("40", "900") + "{{ n.x | tojson(indent=1) }}",
    "a width of a format": "{{ '{:1000000000}'.format(1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a centred text": "{{ 'a' | center(1000000000) }}",
    "a number with zeros": "{{ 'a'.zfill(1000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a number is rounded": "{{ 3 | round(1000000000, 'ceil') }}",
    "macros that double": "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for i in range(60) %}{% set n.x = m(n.x) %}{% endfor %}",
    "a block of texts": _LONG + "{% set b %}{% for i in range(9000) %}{{ t }}{% endfor %}{% endset %}",
    "slices": _LONG + "{% set n = namespace(l=[]) %}{% for i in range(9000) %}{% set n.l = [n.l, t[i:]] %}{% endfor %}",
    "literals": "{% set n = namespace(l=[]) %}{% for i in range(9000) %}{% set n.l = [n.l, ["
    + "1, " * 5000
    + "]] %}{% endfor %}",
    "namespaces in namespaces": "{% set a = namespace() %}"
    + "{% set b = namespace(x=a, y=a) %}{% set a = b %}" * 40
    + "{{ a }}{{ [a] | tojson }}",
    "texts that are kept": _LONG + "".join(f"{{% set a{i} = t ~ {i} %}}" for i in range(900)),
    "lists that are kept": _MANY + "".join(f"{{% set a{i} = l + [{i}] %}}" for i in range(900)),
    "namespaces that are kept": "{% set n = namespace(x=0) %}{% for i in range(9000) %}{% for j in range(9000) %}"
    "{% set n.x = namespace(p=n.x) %}{% endfor %}{% endfor %}",
}
SLOW = {
    "sorts": _MANY + "{% set a = l | sort %}" * 300,
    "maxima": _MANY + "{% set a = l | max %}" * 300,
    "comparisons": _MANY + "{% set m = l + [1] %}{% set k = l + [2] %}" + "{% if m == k %}{% endif %}" * 3000,
    "tests": _MANY + "{% set m = l + [1] %}{% set k = l + [2] %}" + "{% if m is eq k %}{% endif %}" * 3000,
    "searches": _MANY + "{% if 'x' in l %}{% endif %}" * 3000,
    "searches of a text": _LONG + "{% if t.find('aB ' * 1000 ~ 'x') %}{% endif %}" * 300,
    "titles": _LONG + "{% set a = t | title %}" * 300,
    "lazy maps": _MANY + "{{ l | map('string') | map('upper') | map('lower') | reject('none') | list | length }}" * 30,
    "a lazy search": "{{ range(16000) | select('gt', 99999) | first }}" * 30,
    "written lists": _MANY + "{{ l }}" * 300,
    "indented JSON": _MANY + "{% set a = l | tojson(indent=1) %}" * 300,
    "deep JSON": _DEEP + "{% set a = n.x | tojson(indent=1) %}" * 300,
    "a long body": "{% for i in range(9000) %}" + "{% set a = ('aB-' * 80) | title %}" * 1000 + "{% endfor %}",
    "a long macro": "{% macro m() %}"
    + "{% set a = 'ab' ~ i %}" * 1000
    + "{% endmacro %}{% for i in range(9000) %}{% set b = m() %}{% endfor %}",
    "slices of a list": _MANY + "{% set a = l[1:] %}" * 3000,
    "sorted entries": _DICT + "{% set a = d | dictsort %}" * 300,
    "copies": _DICT + "{% set a = d.copy() %}" * 3000,
    "views in lists": _DICT + "{% set a = d.items() | list %}" * 300,
    "keys less keys": _DICT + "{% set a = d.keys() - d.keys() %}" * 1000,
    "values of a view": _DICT + "{% for i in range(9000) %}{% if i in d.values() %}{% endif %}{% endfor %}",
    "equal hashes": _PAIRS + "{% set a = n.x | unique | list %}" * 300,
}


def rendered(source: str, clock: RenderClock) -> None:
    environment = TemplateEnvironment()
    template = environment.bounded(environment.parse(source))
    clock.begin({})
    template.render(messages=[])


@pytest.mark.parametrize("name", GROWING)
def test_work_that_grows_is_ended(name: str) -> None:
    begun_s = time.thread_time()
    with pytest.raises((jinja2.TemplateRuntimeError, RecursionError)):
        rendered(GROWING[name], RenderClock(LIMIT_S))
    assert time.thread_time() - begun_s < 20 * LIMIT_S


def test_the_error_names_the_limit() -> None:
    with pytest.raises(jinja2.TemplateRuntimeError, match="more than 0 s"):
        rendered(GROWING["a loop"], RenderClock(0.0))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused(name: str) -> None:
    """By counts and sizes, before any call takes memory."""
    tracemalloc.start()
    try:
        with pytest.raises((jinja2.TemplateError, TypeError, RecursionError)):
            rendered(HOSTILE[name], RenderClock())
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [*SLOW, *HOSTILE])
def test_no_call_takes_long(name: str) -> None:
    """The event loop is held for 30 ms and one call: 50 ms on an idle core."""
    gc.collect()
    gc.freeze()  # objects of other tests are not collected while it runs
    try:
        clock = RenderClock(max_step_s=0.03)
        with suppress(jinja2.TemplateError, TypeError, StepTooLongError):
            rendered((SLOW | HOSTILE)[name], clock)
        took_s = time.thread_time() - clock._begun_s
    finally:
        gc.unfreeze()
    assert took_s < 0.15
