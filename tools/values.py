"""Write the chart's schema and names, and the table in docs/kubernetes/values.md.

The chart's own values are declared once, in values.yaml: a comment at each has its kind in braces, and what it
means. Options of the processes are declared once, as fields of their configs.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from functools import reduce
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from server.config import GatewayConfig
from worker.common.options import SharedConfig, num_bytes, option_name
from worker.config import WorkerConfig

Schema = dict[str, Any]

ROOT: Final = Path(__file__).parents[1]
CHART: Final = ROOT / "helm" / "headstart"
DOCS: Final = ROOT / "docs" / "kubernetes" / "values.md"
WIDTH: Final = 120
MAX_DEFAULT: Final = 40
"""Characters of a default that a row shows."""
_LINE: Final = re.compile(r"(?P<indent> *(?:- )?)(?P<key>[\w./-]+):.*?(?:  # (?P<note>.*))?")
_NOTE: Final = re.compile(r"\{(?P<kind>.+?)\} (?P<text>.*)")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d*)")
_QUANTITY: Final = r"^$|^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
_SIZE: Final = r"^[0-9]+(\.[0-9]+)?[KMGTkmgt]?(i?[Bb])?$"  # of `num_bytes`


def _text(pattern: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": pattern, **more}


def _object(*required: str, **properties: Schema) -> Schema:
    parts = {"required": list(required), "properties": properties}
    return {"type": "object"} | {name: part for name, part in parts.items() if part}


def _closed(*required: str, **properties: Schema) -> Schema:
    return _object(*required, **properties) | {"additionalProperties": False}


def _kind(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


_NUMBER: Final[Schema] = {"type": "integer", "minimum": 1}
_STRING: Final[Schema] = {"type": "string"}
_SHARED_CONTEXT: Final = (
    *("appArmorProfile", "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile"),
    "windowsOptions",
)
_POD_CONTEXT: Final = (
    *("fsGroup", "fsGroupChangePolicy", "seLinuxChangePolicy", "supplementalGroups", "supplementalGroupsPolicy"),
    "sysctls",
)
_CONTEXT: Final = ("allowPrivilegeEscalation", "capabilities", "privileged", "procMount", "readOnlyRootFilesystem")
_TIMINGS: Final = {"periodSeconds": _NUMBER, "timeoutSeconds": _NUMBER}
KINDS: Final[dict[str, Schema]] = {
    "name": _text(r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$", maxLength=253),
    "shortName": _text(r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", maxLength=30),
    "entry": _text("^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", maxLength=20),
    "dns": _text(r"^$|^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"),
    "user": _text("^[A-Za-z0-9._-]*$"),
    "text": {"type": "string", "minLength": 1},
    "url": _text(r"^$|^https?://[^\s/]+(/\S*)?$"),
    "engine": _text(r"^https?://([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?$"),
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "quantity": {"type": ["string", "integer"], "pattern": _QUANTITY, "minimum": 1},
    "share": {"type": ["integer", "string"], "minimum": 0, "pattern": "^$|^[0-9][0-9]?%$|^100%$"},
    "strings": {"type": "object", "additionalProperties": _STRING},
    "object": {"type": "object"},
    "named": _closed("name", name=_kind("name"), request=_STRING),
    "item": _object("name"),
    "mount": _object("name", "mountPath"),
    "container": _object("name", "image"),
    "trigger": _object("type", "metadata"),
    "spread": _object("topologyKey", "maxSkew", "whenUnsatisfiable"),
    "host": _closed(
        "host",
        host=_kind("text"),
        path=_text("^/"),
        pathType={"enum": ["Prefix", "Exact", "ImplementationSpecific"]},
    )
    | {"type": ["string", "object"], "minLength": 1},
    "relabeling": _closed(
        **dict.fromkeys(("separator", "targetLabel", "regex", "replacement", "action"), _STRING),
        sourceLabels={"type": "array"},
        modulus=_NUMBER,
    ),
    "image": _object(
        repository=_kind("text"),
        tag=_text("^[A-Za-z0-9_.-]*$"),
        digest=_text("^(sha256:[0-9a-f]{64})?$"),
        pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    ),
    "amounts": _object(**dict.fromkeys(("cpu", "memory", "ephemeral-storage"), _kind("quantity"))),
    "loading": _object(**_TIMINGS),
    "probe": _object(**_TIMINGS, failureThreshold=_NUMBER),
    "podContext": {"type": "object", "propertyNames": {"enum": sorted(_SHARED_CONTEXT + _POD_CONTEXT)}},
    "context": {"type": "object", "propertyNames": {"enum": sorted(_SHARED_CONTEXT + _CONTEXT)}},
}
"""The words in braces, next to `a | b`, `1..9`, `/pattern/` and `[kind]` for lists."""
_BOTH: Final = {
    "host": "ipFamily",
    "port": "gateway.service.port",
    "drain-grace-s": "drain.timeoutSeconds",
    "cluster-secret-file": "clusterSecret",
    "otlp-endpoint": "tracing.endpoint",
    "redis": "redis.mode and redis.external.url",
    "redis-prefix": "redis.prefix",
    "redis-shards": "redis.shards",
    "redis-password-file": "redis.existingSecret",
    "worker-ca": "tls.workers.secret",
    "worker-tls-name": "tls.workers.name",
}
SET_BY_THE_CHART: Final[dict[str, dict[str, str]]] = {
    "gateway": _BOTH
    | {
        "ops-host": "ipFamily",
        "ops-port": "the port 8001 of the Service NAME-gateway-ops",
        "drain-notice-s": "gateway.drain.noticeSeconds",
        "tls-cert": "tls.gateway.secret",
        "tls-key": "tls.gateway.secret",
        "redis-username": "redis.gatewayUsername",
        "usage-log": "gateway.usageLog.enabled",
        "ops-key-file": "opsKey.enabled",
        "api-keys": "apiKeys.enabled",
        "limits-gateways": "gateway.replicas",
    },
    "worker": _BOTH
    | {
        "port": "the ports 8100 and up of the pod",
        "advertise-url": "ipFamily",
        "worker-id": "the pod's name",
        "tls-cert": "tls.workers.secret",
        "tls-key": "tls.workers.secret",
        "redis-username": "redis.workerUsername",
        "model": "source",
        "served-model-name": "servedName",
        "device": "gpu.count",
        "kv-disk": "kvDisk.size",
        "kv-disk-size": "kvDisk.size",
        "engine": "the value engine",
        "engine-url": "external.urls",
        "engine-key-file": "vllm.apiKey.existingSecret",
        "engine-rank": "vllm.dataParallelSize",
        "events": "external.events",
        "events-replay": "external.events",
        "events-exposed": "external",
    },
}
"""Options that the chart sets itself, and the value to use."""
INSTEAD: Final = {
    "logging": "log-level and log-format in gateway.options and worker.options, and access-log in gateway.options",
    "gateway.scaleObjectiveSeconds": "gateway.options.scale-objective-s",
    "redis.limitsUsername": "redis.gatewayUsername",
    "gateway.extraArgs": "each option in gateway.options",
    "worker.extraArgs": "each option in options",
    "worker.vllm.blockSize": "--block-size in vllm.extraArgs",
    "worker.resources.requests.nvidia.com/gpu": "gpu.count and gpu.resourceName",
    "worker.resources.limits.nvidia.com/gpu": "gpu.count and gpu.resourceName",
}
"""Names of before whose substitute has another name, and other usual mistakes."""
_CONFIGS: Final[dict[str, type[SharedConfig]]] = {"gateway": GatewayConfig, "worker": WorkerConfig}
_OWN_GROUPS: Final = ("model", "KV cache", "batching")
_OF_ADAPTERS: Final = {"block-size", "default-chat-template-kwargs", "generation-config", "max-model-len"}


class Value(NamedTuple):
    """A value of the chart: its path, what it takes (empty: by its default), its meaning and its default."""

    path: list[str]
    kind: str
    meaning: str
    default: Any


def described(text: str) -> Iterator[Value]:
    """Yield each value that has a comment, in a line above or at its end."""
    defaults = yaml.safe_load(text)
    path: dict[int, str] = {}
    above: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("# "):
            above.append(line.strip()[2:])
            continue
        if match := _LINE.fullmatch(line):
            indent = len(match["indent"])
            path = {width: key for width, key in path.items() if width < indent} | {indent: match["key"]}
            if note := " ".join(above) or match["note"]:
                found = _NOTE.fullmatch(note)
                kind, meaning = (found["kind"], found["text"]) if found else ("", note)
                yield Value(list(path.values()), kind, meaning, reduce(_inner, path.values(), defaults))
        above = []


def _inner(node: Any, key: str) -> Any:
    return (node[0] if isinstance(node, list) else node)[key]


def schema_of(kind: str, default: Any) -> Schema:
    """Return the schema of a value; without a kind, by its default."""
    if " | " in kind:
        return {"enum": [word.strip('"') for word in kind.split(" | ")]}
    if match := _RANGE.fullmatch(kind):
        return {"type": "integer", "minimum": int(match[1])} | ({"maximum": int(match[2])} if match[2] else {})
    if kind.startswith("["):
        return {"type": "array", "items": schema_of(kind[1:-1], None)}
    if kind.startswith("/"):
        return _text(kind[1:-1])
    if kind:
        return _kind(kind)
    match default:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case list():
            return {"type": "array"}
        case dict():
            return {"properties": {}} if default else {"type": "object"}
        case _:
            return {"type": "string"}


def options(part: str) -> dict[str, Field[Any]]:
    """Return the options of a process by their names, without those that the chart sets itself."""
    named = {(each.metadata["flag"] or option_name(each.name))[2:]: each for each in fields(_CONFIGS[part])}
    return {name: each for name, each in named.items() if name not in SET_BY_THE_CHART[part]}


def option_schema(each: Field[Any]) -> Schema:
    """Return the schema of an option, by its field. Null stands for the process's default."""
    least, most, arguments = each.metadata["least"], each.metadata["most"], each.metadata["arguments"]
    kind, action = arguments.get("type"), arguments.get("action")
    meaning = {"description": arguments["help"]}
    if "choices" in arguments:
        return meaning | {"enum": list(arguments["choices"])}
    if action in ("store_true", "store_false"):
        return meaning | {"type": ["boolean", "null"]}
    if action in ("extend", "append"):
        return meaning | {"type": ["array", "string", "null"], "items": _STRING}
    if kind is num_bytes:
        return meaning | {"type": ["string", "integer", "null"], "pattern": _SIZE, "minimum": least or 0}
    if kind in (int, float):
        above_0 = {"minimum": 1} if kind is int else {"exclusiveMinimum": 0}
        bounds = (above_0 if least is None else {"minimum": least}) | ({} if most == math.inf else {"maximum": most})
        return meaning | {"type": ["integer" if kind is int else "number", "null"]} | bounds
    return meaning | {"type": ["string", "null"]}


def schema(text: str) -> Schema:
    """Return the contents of values.schema.json."""
    tree: Schema = {"properties": {}}
    for path, kind, meaning, default in described(text):
        node = tree
        for key in path[:-1]:
            node = node["properties"][key]
            node = node.setdefault("items", {"properties": {}}) if node.get("type") == "array" else node
        node["properties"][path[-1]] = {"description": meaning} | schema_of(kind, default)
    properties = tree["properties"]
    for part in _CONFIGS:
        map_of_options = {name: option_schema(each) for name, each in options(part).items()}
        properties[part]["properties"]["options"]["properties"] = map_of_options
    properties["models"]["items"] |= {"required": ["name"], "allOf": [_kind("worker")]}
    definitions = KINDS | {"worker": properties["worker"]}
    properties["worker"] = _kind("worker")
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "required": ["models"]}
    return head | tree | {"definitions": definitions}


def groups(node: Schema, definitions: Mapping[str, Schema], path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each group of values with its keys."""
    yield path, list(node["properties"])
    for key, child in node["properties"].items():
        child = definitions[child["$ref"].rpartition("/")[2]] if "$ref" in child else child
        if "properties" in child:
            yield from groups(child, definitions, f"{path}.{key}".removeprefix("."))


def names(tree: Schema) -> dict[str, Any]:
    """Return what templates/_names.tpl reads: each group's keys, options of the own engine, and what to use instead."""
    taken = {f"{part}.options.{name}": use for part, each in SET_BY_THE_CHART.items() for name, use in each.items()}
    own = {name for name, each in options("worker").items() if each.metadata["group"] in _OWN_GROUPS}
    return {
        "groups": dict(groups(tree, tree["definitions"])),
        "ownEngine": sorted(own - _OF_ADAPTERS),
        "instead": INSTEAD | taken,
    }


def dumped(value: Any, indent: str = "") -> str:
    """Return JSON of which a line holds what fits in it."""
    line, inner = json.dumps(value), f"{indent} "
    is_leaf = line.startswith('{"description"') and '"properties"' not in line
    if len(line) + len(inner) < WIDTH or is_leaf or not isinstance(value, dict | list):
        return line
    if isinstance(value, list):  # of names
        filled = textwrap.fill(line[1:-1], WIDTH, initial_indent=inner, subsequent_indent=inner, break_on_hyphens=False)
        return f"[\n{filled}\n{indent}]"
    parts = f",\n{inner}".join(f"{json.dumps(key)}: {dumped(each, inner)}" for key, each in value.items())
    return f"{{\n{inner}{parts}\n{indent}}}"


def table(text: str) -> str:
    """Return every value with its default and what it means. Defaults too long for a row are left to values.yaml."""
    lines = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, kind, meaning, default in described(text):
        if isinstance(default, dict) and default and not kind and path[-1] != "options":
            continue  # a group
        shown = f"`{json.dumps(default)}`"
        takes = f" ({kind.replace(' |', ',')})" if " | " in kind or _RANGE.fullmatch(kind) else ""
        lines.append(f"| `{'.'.join(path)}` | {shown if len(shown) < MAX_DEFAULT else ''} | {meaning}{takes} |")
    return "\n".join(lines)


def with_table(page: str, text: str) -> str:
    """Return the page with the table between its marks."""
    begin, end = "<!-- values: begin -->", "<!-- values: end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table(text)}\n{end}{after}"


def files() -> dict[Path, str]:
    """Return the text of each file."""
    text = (CHART / "values.yaml").read_text()
    tree = schema(text)
    return {
        CHART / "values.schema.json": dumped(tree) + "\n",
        CHART / "files" / "names.json": dumped(names(tree)) + "\n",
        DOCS: with_table(DOCS.read_text(), text),
    }
