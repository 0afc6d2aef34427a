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


CLAIM: Final = {"name": text("Its name in `resourceClaims`."), "request": text("A request of it; empty: all.")}
SHARED_CONTEXT: Final = (
    *("appArmorProfile", "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile"),
    "windowsOptions",
)
POD_CONTEXT: Final = (
    *SHARED_CONTEXT,
    *("fsGroup", "fsGroupChangePolicy", "seLinuxChangePolicy", "supplementalGroups", "supplementalGroupsPolicy"),
    "sysctls",
)
CONTAINER_CONTEXT: Final = (
    *SHARED_CONTEXT,
    *("allowPrivilegeEscalation", "capabilities", "privileged", "procMount", "readOnlyRootFilesystem"),
)


def security_contexts() -> dict[str, Schema]:
    """Fields that are set replace the default's; null removes one."""
    return {
        "podSecurityContext": free("Security context of the pods, merged by field; null removes one.")
        | {"propertyNames": {"enum": sorted(POD_CONTEXT)}},
        "securityContext": free("That of the chart's own containers, merged by field; null removes one.")
        | {"propertyNames": {"enum": sorted(CONTAINER_CONTEXT)}},
    }


def probe(meaning: str, *, threshold: bool = True) -> Schema:
    """The timings of a probe; what it asks is the chart's."""
    timings = {
        "periodSeconds": whole("Time from one to the next.", 1),
        "timeoutSeconds": whole("Time for an answer.", 1),
        "failureThreshold": whole("Failures in a row that count.", 1),
    }
    return group(meaning, **(timings if threshold else {key: timings[key] for key in list(timings)[:2]}))


def probes(*, loading: bool = False) -> dict[str, Schema]:
    """With `loading`, startupTimeoutSeconds stands for the startup probe's failures."""
    startup = "Whether it has started" + ("; startupTimeoutSeconds ends it." if loading else ".")
    return {
        "startupProbe": probe(startup, threshold=not loading),
        "readinessProbe": probe("Whether it takes requests."),
        "livenessProbe": probe("Whether it makes progress; the container restarts else."),
    }


def image(whose: str, tag: str) -> Schema:
    return group(
        f"The image of {whose}.",
        repository=text(f"Repository of {whose}'s image, with its registry.", minLength=1),
        tag={"type": ["string"], "description": tag, "pattern": r"^[A-Za-z0-9_.-]*$"},
        digest=text("Digest that pins the image; wins over the tag.", pattern="^(sha256:[0-9a-f]{64})?$"),
        pullPolicy=choice("When the image is pulled.", "Always", "IfNotPresent", "Never"),
    )


def count_or_percentage(meaning: str, minimum: int = 1, *, optional: bool = False) -> Schema:
    pattern = r"^[1-9][0-9]?%$|^100%$" + (r"|^0%$" if minimum == 0 else "") + ("|^$" if optional else "")
    return {"type": ["integer", "string"], "description": meaning, "minimum": minimum, "pattern": pattern}


def objects(meaning: str, *required: str) -> Schema:
    """A list that is written into a pod as it stands."""
    return array(meaning, {"type": "object", "required": list(required)})


def resources(whose: str, *, claims: str = "") -> Schema:
    amounts = {
        "cpu": quantity(f"CPUs of {whose}."),
        "memory": quantity(f"Memory of {whose}."),
        "ephemeral-storage": quantity(f"Local storage of {whose}."),
    }
    return group(
        f"Requests and limits of {whose}; GPUs stand in `gpu`.",
        requests=group("What is reserved.", **amounts),
        limits=group("What is never exceeded.", **amounts),
        **({"claims": array(claims, group("A claim.", ("name",), **CLAIM))} if claims else {}),
    )


def placement() -> dict[str, Schema]:
    return {
        "serviceAccountName": name("Service account of the pods, which exists; empty: the release's."),
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
        "hostNetwork": flag("Whether the pods use the node's network, with their ports; only without NetworkPolicies."),
        "schedulerName": name("Scheduler of the pods; empty: the cluster's default."),
        **security_contexts(),
        "podLabels": strings("Further labels of the pods."),
        "podAnnotations": strings("Annotations of the pods."),
        "extraArgs": array("Further options of the command line.", {"type": "string", "minLength": 1}),
        "extraEnv": array("Further environment variables.", {"type": "object", "required": ["name"]}),
        "extraEnvFrom": objects("Further environment variables, of whole ConfigMaps and Secrets."),
        "extraVolumes": array("Further volumes.", {"type": "object", "required": ["name"]}),
        "extraVolumeMounts": array("Further mounts.", {"type": "object", "required": ["name", "mountPath"]}),
        "initContainers": objects("Containers that end before the chart's start.", "name", "image"),
        "extraContainers": objects("Containers next to the chart's.", "name", "image"),
        "resourceClaims": objects("DRA claims of the pods; `resources.claims` uses them.", "name"),
        "podDisruptionBudget": group(
            "How many pods a node drain may take at once.",
            enabled=flag("Whether there is a PodDisruptionBudget."),
            maxUnavailable=count_or_percentage("Pods, or a percentage of them."),
            minAvailable=count_or_percentage("Pods that stay, instead; empty: maxUnavailable.", optional=True),
        ),
    }


def drain(whose: str, after_s: int, before: str, what: str) -> Schema:
    """Return the settings of an end: `before` is the name of the time before the drain."""
    return group(
        f"How {whose} stops. The pods' grace period is {before} + timeoutSeconds + {after_s}.",
        **{before: whole(what, 0, 600)},
        timeoutSeconds=whole("Time for open requests after SIGTERM; the rest end with an error.", 1, 86400),
    )


def autoscaling(target: Schema, target_name: str, **more: Schema) -> Schema:
    return group(
        "Scaling by load. While it is on, `replicas` is not rendered.",
        enabled=flag("Whether replicas follow the load."),
        kind=choice("HorizontalPodAutoscaler, or a KEDA ScaledObject.", "hpa", "keda"),
        **{"minReplicas": whole("Never fewer.", 1), "maxReplicas": whole("Never more.", 1), target_name: target} | more,
        scaleDownStabilizationSeconds=whole("How long the load is low before a pod goes.", 0, 3600),
        prometheusAddress=text("Address of a Prometheus, for kind keda.", pattern="^(https?://.+)?$"),
    )
