"""The terms in which values are described, as JSON schema, and the parts that several values share."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

QUANTITY: Final = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
DNS_NAME: Final = r"^$|^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"
NAME: Final = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"


def text(meaning: str, **more: Any) -> Schema:
    return {"type": "string", "description": meaning, **more}


def name(meaning: str) -> Schema:
    return text(meaning, pattern=r"^([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?$", maxLength=253)


def choice(meaning: str, *values: str) -> Schema:
    return text(meaning, enum=list(values))


def quantity(meaning: str, *, optional: bool = False) -> Schema:
    pattern = QUANTITY if not optional else f"^$|{QUANTITY}"
    return {"type": ["string", "integer"], "description": meaning, "pattern": pattern, "minimum": 1}


def whole(meaning: str, minimum: int = 0, maximum: int | None = None) -> Schema:
    bounds = {"minimum": minimum} | ({} if maximum is None else {"maximum": maximum})
    return {"type": "integer", "description": meaning, **bounds}


def flag(meaning: str) -> Schema:
    return {"type": "boolean", "description": meaning}


def array(meaning: str, items: Schema, **more: Any) -> Schema:
    return {"type": "array", "description": meaning, "items": items, **more}


def free(meaning: str) -> Schema:
    """An object that Kubernetes defines."""
    return {"type": "object", "description": meaning}


def strings(meaning: str) -> Schema:
    return {"type": "object", "description": meaning, "additionalProperties": {"type": "string"}}


def group(meaning: str, required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    schema = {"type": "object", "description": meaning, "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def image(whose: str, tag: str) -> Schema:
    return group(
        f"The image of {whose}.",
        repository=text(f"Repository of {whose}'s image, with its registry.", minLength=1),
        tag={"type": ["string"], "description": tag, "pattern": r"^[A-Za-z0-9_.-]*$"},
        digest=text("Digest that pins the image; wins over the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=choice("When the image is pulled.", "Always", "IfNotPresent", "Never"),
    )


def resources(whose: str) -> Schema:
    amounts = {
        "cpu": quantity(f"CPUs of {whose}."),
        "memory": quantity(f"Memory of {whose}."),
        "ephemeral-storage": quantity(f"Local storage of {whose}."),
    }
    return group(
        f"Requests and limits of {whose}; GPUs stand in `gpu`.",
        requests=group("What is reserved.", **amounts),
        limits=group("What is never exceeded.", **amounts),
    )


def placement() -> dict[str, Schema]:
    return {
        "priorityClassName": name("Priority class of the pods."),
        "nodeSelector": strings("Labels of the nodes that may run the pods."),
        "tolerations": array("Tolerations of the pods.", free("A toleration.")),
        "affinity": free("Affinity of the pods."),
    }


def pod() -> dict[str, Schema]:
    return {
        **placement(),
        "topologySpreadConstraints": array(
            "Spread of the pods, label selector added; empty: over nodes and zones.",
            group(
                "A constraint.",
                ("topologyKey", "maxSkew", "whenUnsatisfiable"),
                topologyKey=text("Label of the nodes."),
                maxSkew=whole("Largest difference.", 1),
                whenUnsatisfiable=choice("What happens else.", "DoNotSchedule", "ScheduleAnyway"),
                minDomains=whole("Least number of domains.", 1),
                labelSelector=free("Which pods are counted."),
                matchLabelKeys=array("Keys of pod labels.", {"type": "string"}),
                nodeAffinityPolicy=choice("How affinity counts.", "Honor", "Ignore"),
                nodeTaintsPolicy=choice("How taints count.", "Honor", "Ignore"),
            ),
        ),
        "podLabels": strings("Further labels of the pods."),
        "podAnnotations": strings("Annotations of the pods."),
        "extraArgs": array("Further options of the command line.", {"type": "string", "minLength": 1}),
        "extraEnv": array("Further environment variables.", {"type": "object", "required": ["name"]}),
        "extraVolumes": array("Further volumes.", {"type": "object", "required": ["name"]}),
        "extraVolumeMounts": array("Further mounts.", {"type": "object", "required": ["name", "mountPath"]}),
        "podDisruptionBudget": group(
            "How many pods a node drain may take at once.",
            enabled=flag("Whether there is a PodDisruptionBudget."),
            maxUnavailable={
                "type": ["integer", "string"],
                "description": "Pods, or a percentage of them.",
                "minimum": 1,
                "pattern": "^[1-9][0-9]?%$|^100%$",
            },
        ),
    }


def drain(whose: str, after_s: int, why: str) -> Schema:
    return group(
        f"How {whose} stops. The pods' grace period is preStopSeconds + timeoutSeconds + {after_s}.",
        preStopSeconds=whole(f"Sleep before SIGTERM. {why}", 0, 600),
        timeoutSeconds=whole("Time for open requests after SIGTERM; the rest end with an error.", 1, 86400),
    )


def autoscaling(target: Schema, target_name: str, **more: Schema) -> Schema:
    return group(
        "Scaling by load. While it is on, `replicas` is not rendered.",
        enabled=flag("Whether replicas follow the load."),
        kind=choice("HorizontalPodAutoscaler, or a KEDA ScaledObject.", "hpa", "keda"),
        minReplicas=whole("Never fewer. No scaling to zero: a model needs a worker.", 1),
        maxReplicas=whole("Never more.", 1),
        **{target_name: target},
        **more,
        scaleDownStabilizationSeconds=whole("How long the load is low before a pod goes.", 0, 3600),
        prometheusAddress=text("Address of a Prometheus, for kind keda.", pattern="^(https?://.+)?$"),
    )
