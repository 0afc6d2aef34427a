"""The images built from the shipped Dockerfile, and the chart's pods on a podman network: two gateways, two workers
with a tiny random model, Redis with the chart's users. Real containers, real signals, the OpenAI client unchanged.
"""

from __future__ import annotations

import base64
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.k8s import chart, podman
from tests.k8s.chart import rendered
from tests.k8s.fleet import VALUES, Fleet, running_fleet, scrape, wait_for_workers
from tests.k8s.load import PROMPT, Load
from tests.k8s.metric_names import names_in_alerts, names_in_chart, names_in_dashboard, names_in_scrape
from tests.k8s.podman import Container
from tests.k8s.tools import call
from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S, wait_until

MAX_GATEWAY_BYTES = 250_000_000


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    if not (podman.DEST / "wheels").exists():
        pytest.fail("the tools of these tests are not installed: run `make test-k8s`", pytrace=False)
    podman.import_base()
    return {target: podman.build(target) for target in ("gateway", "worker")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "tiny")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def fleet(images: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(models, tmp_path_factory.mktemp("pods")) as fleet:
        yield fleet


def test_the_gateway_image_is_slim(images: dict[str, str]) -> None:
    added = podman.image_bytes(images["gateway"]) - podman.image_bytes(podman.BASE)
    print(f"gateway image: {added / 1e6:.0f} MB over its base")
    assert 0 < added <= MAX_GATEWAY_BYTES


def test_the_gateway_image_holds_no_torch_and_no_installer(images: dict[str, str]) -> None:
    code = "from importlib.util import find_spec as f; print([m for m in ('torch', 'transformers', 'pip') if f(m)])"
    output = podman.podman(
        "run", "--rm", "--pull=never", "--entrypoint", "python3", images["gateway"], "-I", "-c", code
    )
    assert output.strip() == "[]"


def test_the_openai_client_is_answered(fleet: Fleet) -> None:
    client = fleet.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": PROMPT}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
    assert first.usage is not None
    assert first.usage.completion_tokens > 0
    streamed = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,  # type: ignore[arg-type]
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        == first.choices[0].message.content
    )


def test_both_gateways_share_the_index_through_redis(fleet: Fleet) -> None:
    """A prefix sent by one gateway is found by the other, with the chart's users, which have few rights."""
    prompt = "A story that only the first gateway has heard so far, " * 8
    answers = []
    for gateway in (fleet.gateways[0], fleet.gateways[1], fleet.gateways[1]):
        raw = fleet.client(gateway).completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=1)
        answers.append((raw.headers["x-headstart-worker"], raw.parse().usage))
        time.sleep(0.5)  # longer than a publish takes
    workers = {worker for worker, _ in answers}
    assert len(workers) == 1, answers
    usage = answers[1][1]
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0, answers


def test_containers_are_confined(fleet: Fleet) -> None:
    """As the chart asks, seen from outside: uid, capabilities, seccomp, no new privileges, read-only root, memory."""
    for container in (fleet.redis, *fleet.workers, *fleet.gateways):
        status = dict(re.findall(r"^(\w+):\s+(.*)$", Path(f"/proc/{container.pid}/status").read_text(), re.MULTILINE))
        uid = str(container.pod["spec"]["securityContext"]["runAsUser"])
        assert int(uid) >= 10000
        assert set(status["Uid"].split()) == set(status["Gid"].split()) == {uid}
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        mounts = Path(f"/proc/{container.pid}/mounts").read_text()
        (root,) = [line.split()[3] for line in mounts.splitlines() if line.split()[1] == "/"]
        assert "ro" in root.split(","), root
        limit = podman.num_bytes(container.spec["resources"]["limits"]["memory"])
        assert int(container.inspect("{{.HostConfig.Memory}}")) == limit
        assert _cgroup_limit(container.pid) == limit


def _cgroup_limit(pid: int) -> int:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes").read_text())
        if controllers == "" and (unified := Path(f"/sys/fs/cgroup{path}/memory.max")).exists():
            return int(unified.read_text())
    raise AssertionError("no memory controller")


def test_a_write_to_the_root_is_refused(fleet: Fleet) -> None:
    for container in (fleet.workers[0], fleet.gateways[0]):
        done = container.exec("python3", "-I", "-c", "open('/opt/headstart/x', 'w')")
        assert done.returncode != 0
        assert "Read-only file system" in done.stderr
        assert container.exec("python3", "-I", "-c", "open('/tmp/x', 'w').write('fine')").returncode == 0


def test_the_memory_limit_kills(images: dict[str, str]) -> None:
    options = ["--rm", "--pull=never", "--memory=64m", "--memory-swap=64m", "--entrypoint", "python3"]
    done = podman.try_podman("run", *options, images["gateway"], "-I", "-c", "x = bytearray(256 << 20)")
    assert done.returncode == 137


def test_health_checks_of_the_images_pass(fleet: Fleet) -> None:
    for container in (fleet.gateways[0], fleet.workers[0]):
        done = podman.try_podman("healthcheck", "run", container.name)
        assert done.returncode == 0, done.stdout + done.stderr


def test_redis_refuses_what_the_chart_does_not_grant(fleet: Fleet) -> None:
    secret = "rel-headstart-redis"
    passwords = {role: fleet.lab.secret(secret, f"{role}-password") for role in ("gateway", "worker")}

    def ask(role: str, *command: str) -> str:
        login = ["--user", f"headstart-{role}", "--pass", passwords[role]] if role else []
        done = fleet.redis.exec("redis-cli", "--no-auth-warning", *login, *command)
        return done.stdout.strip() + done.stderr.strip()

    own, foreign = "{headstart:0}:version", "other"
    assert ask("gateway", "GET", own)
    assert "NOPERM" not in ask("gateway", "GET", own)
    write = "return redis.call('HSET', KEYS[1] or 'other', 'a', 'b')"
    for command in (
        ("SET", own, "x"),
        ("GET", foreign),
        ("EVAL", write, "1", own),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("CONFIG", "GET", "*"),
    ):
        assert "NOPERM" in ask("gateway", *command), command
    assert "can't access" in ask("gateway", "EVAL", write, "0"), "a script may write counters of limits only"
    assert ask("gateway", "EVAL", write, "1", "{headstart:0}:limits:key") == "1"
    for command in (
        ("GET", foreign),
        ("SET", foreign, "x"),
        ("EVAL", "return 1", "0"),
        ("FLUSHALL",),
        ("KEYS", "*"),
        ("ACL", "LIST"),
    ):
        assert "NOPERM" in ask("worker", *command), command
    assert "NOAUTH" in ask("", "GET", own) or "NOPERM" in ask("", "GET", own)
    files = fleet.redis.exec("cat", "/run/redis/users.acl").stdout
    assert "headstart-gateway" in files
    assert not any(password in files for password in passwords.values())


def test_secrets_stand_in_no_command_line_or_environment(fleet: Fleet) -> None:
    secrets = [fleet.lab.secret("rel-headstart-redis", f"{role}-password") for role in ("gateway", "worker")]
    secrets.append(fleet.lab.secret("rel-headstart-cluster", "cluster-secret"))
    for container in (fleet.redis, *fleet.workers, *fleet.gateways):
        seen = b"".join(Path(f"/proc/{container.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert not any(secret.encode() in seen for secret in secrets)
        assert not any(secret in container.logs() for secret in secrets)


def test_helm_test_passes(fleet: Fleet) -> None:
    (pod,) = [d for d in fleet.lab.documents if d["kind"] == "Pod"]
    url = pod["spec"]["containers"][0]["args"][-1]
    assert url == "http://rel-headstart-gateway:80"
    # A Service maps port 80 to the container's; here names lead to containers directly.
    pod["spec"]["containers"][0]["args"][-1] = url.replace(":80", ":8000")
    assert "tiny answers:" in fleet.lab.run_to_the_end(pod, "rel-headstart-test")


def test_every_metric_that_the_chart_names_is_in_a_live_scrape(fleet: Fleet) -> None:
    live = names_in_scrape(scrape(fleet.gateways[0], "ops")) | names_in_scrape(scrape(fleet.workers[0], "worker"))
    wanted = names_in_dashboard() | names_in_alerts() | names_in_chart()
    assert len(wanted) > 20
    assert wanted - live == set()


def test_promtool_accepts_the_metrics(fleet: Fleet) -> None:
    """Skip names that others have fixed, with their colons, which promtool rejects."""
    for text in (scrape(fleet.gateways[0], "ops"), scrape(fleet.workers[0], "worker")):
        own = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)
        done = call("promtool", "check", "metrics", input=own)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_rolling_restart_of_the_workers_fails_no_request(fleet: Fleet) -> None:
    with Load(fleet) as load:
        load.wait_for(12)
        for worker in fleet.workers:
            assert worker.stop() == 0, worker.logs()
            load.wait_for(6)
            worker.start()
            for gateway in fleet.gateways:
                wait_for_workers(gateway, 2)
            load.wait_for(6)
    assert load.failures == []


def test_a_rolling_restart_of_the_gateways_fails_no_request(fleet: Fleet) -> None:
    """As in a cluster a gateway leaves the rotation when its preStop begins, and open requests end before it does."""
    with Load(fleet) as load:
        load.wait_for(12)
        for gateway in fleet.gateways:
            fleet.in_rotation.remove(gateway)
            assert gateway.stop() == 0, gateway.logs()
            load.wait_for(6)
            gateway.start()
            wait_for_workers(gateway, 2)
            fleet.in_rotation.append(gateway)
            load.wait_for(6)
    assert load.failures == []
    assert len(load.answers) == 2


def test_a_restart_of_redis_fails_no_request(fleet: Fleet) -> None:
    with Load(fleet) as load:
        load.wait_for(12)
        podman.podman("stop", "--time", "5", fleet.redis.name)
        load.wait_for(12)
        fleet.redis.start()
        load.wait_for(12)
    assert load.failures == []


def test_sigterm_while_the_model_loads_ends_the_worker_at_once(fleet: Fleet) -> None:
    late = fleet.lab.run(fleet.lab.template("rel-headstart-tiny"), "rel-headstart-tiny-9")
    time.sleep(1)  # Python starts: before its first line a signal to process 1 is lost
    assert not late.ready()
    podman.podman("stop", "--time", str(int(HANG_S)), late.name)
    assert int(late.inspect("{{.State.ExitCode}}")) in (0, 143), f"killed in the end: {late.logs()}"


def test_the_default_limits_leave_room(fleet: Fleet) -> None:
    """After all the load above. The chart's own limits, not those of this test."""
    defaults = chart.default_values()
    for container, limit in (
        *((gateway, defaults["gateway"]["resources"]["limits"]["memory"]) for gateway in fleet.gateways),
        (fleet.redis, f"{defaults['redis']['builtin']['memoryMiB']}Mi"),
    ):
        status = Path(f"/proc/{container.pid}/status").read_text()
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert match is not None
        peak = int(match[1]) * 1024
        print(f"{container.name}: {peak / 1e6:.0f} MB at most, the chart's limit is {limit}")
        assert 4 * peak < podman.num_bytes(limit)


def certificate(folder: Path, *names: str) -> dict[str, str]:
    """As cert-manager would put it into a Secret."""
    authority = Authority(folder)
    cert, key = authority.issue("tls", *names)
    files = {"ca.crt": authority.path, "tls.crt": cert, "tls.key": key}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}


def test_tls_keys_and_tokens_everywhere(images: dict[str, str], models: Path, tmp_path: Path) -> None:
    """Clients to gateway, gateway to worker, both to Redis; API keys an ops key; `helm test` through all of it."""
    values: chart.Values = json.loads(json.dumps(VALUES))
    values["redis"]["builtin"]["tlsSecret"] = "redis-tls"
    values["tls"] = {
        "gateway": {"secret": "gateway-tls", "name": "llm.example"},
        "workers": {"secret": "worker-tls", "name": "workers.example"},
    }
    values["apiKeys"] = values["opsKey"] = {"enabled": True}
    names = {"redis-tls": "rel-headstart-redis", "gateway-tls": "llm.example", "worker-tls": "workers.example"}
    secrets = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": secret},
            "data": certificate(tmp_path / secret, dns),
        }
        for secret, dns in names.items()
    ]
    with podman.lab([*rendered(values), *secrets], tmp_path / "pods", {"models": models}) as lab:
        redis = lab.run(lab.template("rel-headstart-redis"), "rel-headstart-redis-0")
        worker = lab.run(lab.template("rel-headstart-tiny"), "rel-headstart-tiny-0")
        gateway = lab.run(lab.template("rel-headstart-gateway"), "rel-headstart-gateway-0")
        for container in (redis, worker, gateway):
            container.wait_ready()
        wait_until(
            lambda: "headstart_worker_index_connected 1.0" in scrape(worker, "worker"), what="it is in the index"
        )
        for container in (worker, gateway):
            done = podman.try_podman("healthcheck", "run", container.name)
            assert done.returncode == 0, done.stdout + done.stderr
        (pod,) = [d for d in lab.documents if d["kind"] == "Pod"]
        arguments = pod["spec"]["containers"][0]["args"]
        assert arguments[1:] == ["https://rel-headstart-gateway:80", "llm.example"]
        arguments[1] = arguments[1].replace(":80", ":8000")
        assert "tiny answers:" in lab.run_to_the_end(pod, "rel-headstart-test")

        plain = redis.exec("redis-cli", "--no-auth-warning", "--user", "probe", "--pass", "probe", "ping")
        assert "PONG" not in plain.stdout
        assert drain_status(gateway, "") == 401
        assert drain_status(gateway, lab.secret("rel-headstart-ops", "ops-key")) == 200


def drain_status(gateway: Container, key: str) -> int:
    request = urllib.request.Request(gateway.url("ops") + "/drain", b"", {"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=HANG_S, context=podman.UNVERIFIED) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
