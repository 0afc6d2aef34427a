"""Templates whose work grows without a bound end with an error."""

from __future__ import annotations

import time

import jinja2
import pytest

from server.text.template_sandbox import RenderClock, TemplateEnvironment

LIMIT_S = 0.1
GROWING = {
    "a loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop's condition": "{% for i in range(99999) if range(9999) | sum < 0 %}{% endfor %}",
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


@pytest.mark.parametrize("name", GROWING)
def test_work_that_grows_is_ended(name: str) -> None:
    environment = TemplateEnvironment()
    template = environment.bounded(environment.parse(GROWING[name]))
    begun_s = time.thread_time()
    with pytest.raises((jinja2.TemplateRuntimeError, RecursionError)):
        template.render(RenderClock(LIMIT_S).variables())
    assert time.thread_time() - begun_s < 20 * LIMIT_S


def test_the_error_names_the_limit() -> None:
    environment = TemplateEnvironment()
    template = environment.bounded(environment.parse(GROWING["a loop"]))
    with pytest.raises(jinja2.TemplateRuntimeError, match=r"more than 0\.1 s"):
        template.render(RenderClock(LIMIT_S).variables())
