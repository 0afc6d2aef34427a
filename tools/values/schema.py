"""The meaning of every value of the chart, in one place."""

from __future__ import annotations

from typing import Final

from server.router.policies import POLICIES
from tools.values.terms import (
    DNS_NAME,
    NAME,
    Schema,
    array,
    autoscaling,
    choice,
    count_or_percentage,
    drain,
    flag,
    free,
    group,
    image,
    name,
    objects,
    placement,
    pod,
    probes,
    quantity,
    resources,
    security_contexts,
    strings,
    text,
    whole,
)

WORKER: Final[dict[str, Schema]] = {
    "engine": choice(
        "The engine of the pods: Headstart's own, or vLLM behind adapters. SGLang only with `external`.",
        *("headstart", "vllm", "sglang"),
    ),
    "image": image("the workers", "Tag of the image; empty: the chart's appVersion and -cpu or -cuda."),
    "replicas": whole("Workers of a model, or pods of adapters with `external`; 0: it is switched off.", 0),
    "servedName": text("The model's name in the API; empty: the entry's name."),
    "gpu": group(
        "The device.",
        count=whole(
            "GPUs of a pod: 0 is the CPU, 1 a GPU or a MIG slice; more need `engine: vllm`.",
            0,
        ),
        resourceName=text("What the device plugin calls a GPU or a slice.", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"),
    ),
    "task": choice(
        "`embed` makes embeddings; `auto` does where the model has a pooling file.", "auto", "generate", "embed"
    ),
    "dtype": choice(
        "Number format; empty: float32 on a CPU, else bfloat16; `auto`: the quickest on the node.",
        *("", "auto", "float32", "bfloat16", "float16"),
    ),
    "weights": choice(
        "`packed` keeps GGUF weights quantised; `auto` does so only in float32 on a CPU.",
        *("auto", "dense", "packed"),
    ),
    "maxModelLen": whole("Longest prompt and answer together, in tokens; 0: the model's.", 0),
    "maxNumSeqs": whole("Sequences in a step.", 1),
    "blockSize": whole("Tokens in a block of the KV cache; the same for all workers of a model.", 1),
    "kvCacheMemory": text("Size of the KV cache; empty: by the free memory.", pattern=r"^$|^[0-9]+(\.[0-9]+)?[KMGT]$"),
    "kvHostMemory": text(
        "Pinned host memory for blocks that a GPU evicts; empty: none. Add it to `resources`.",
        pattern=r"^$|^[0-9]+(\.[0-9]+)?[KMGT]$",
    ),
    "kvDisk": group(
        "A volume for blocks of the KV cache, at /kv in the pod.",
        size=text("Its size; blocks get nine tenths. Empty: none.", pattern=r"^$|^[1-9][0-9]*[MGT]i$"),
        claim=flag("Whether each worker has a claim, which outlives its pods; otherwise an emptyDir."),
        storageClassName=name("Storage class of these claims; empty: the cluster's default."),
    ),
    "threads": whole("CPU threads; 0: as many as the CPU limit allows.", 0),
    "prefixCache": choice("How prefixes are reused.", "hash", "radix", "off"),
    "download": flag("Whether missing models come from the Hugging Face hub (egress to port 443)."),
    "huggingFaceToken": group(
        "Access to gated models.",
        existingSecret=name("Secret with the token; empty: none."),
        key=text("Its key in the Secret.", minLength=1),
    ),
    "vllm": group(
        "vLLM. `extraArgs`, `extraEnv` and `extraVolumeMounts` of the worker are for the adapters in front of it.",
        image=image("vLLM", "Tag of the image."),
        tensorParallelSize=whole("GPUs over which each layer is split.", 1, 64),
        pipelineParallelSize=whole("Groups of them, each with a part of the layers.", 1, 64),
        dataParallelSize=whole("Copies of the model in a pod; each has an adapter, and is a worker.", 1, 16),
        blockSize=whole("Tokens in a block of the engine; 0: its own choice. It need not be `blockSize`.", 0),
        devMode=flag("VLLM_SERVER_DEV_MODE, which a purge needs. The engine listens on loopback only."),
        metrics=flag("Whether a further container relays the engine's own metrics to Prometheus."),
        apiKey=group(
            "A key that the engine asks for.",
            existingSecret=name("Secret with the key; empty: none."),
            key=text("Its key in the Secret.", minLength=1),
        ),
        adapterResources=resources("an adapter"),
        extraArgs=array("Further options of `vllm serve`.", {"type": "string", "minLength": 1}),
        extraEnv=array("Further environment variables of the engine.", {"type": "object", "required": ["name"]}),
        extraEnvFrom=objects("Further variables of the engine, of whole ConfigMaps and Secrets."),
        **probes(loading=True),
        extraVolumeMounts=array(
            "Further mounts of the engine, of `extraVolumes`.", {"type": "object", "required": ["name", "mountPath"]}
        ),
    ),
    "external": group(
        "Engines that run already: the pods are adapters, and each worker in them takes one engine.",
        urls=array(
            "Their URLs, one for each engine.",
            text(
                "A URL.", pattern=r"^https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?$|^https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?$"
            ),
        ),
        service=text("Or a headless Service, NAME or NAME.NAMESPACE: each of its pods.", pattern=DNS_NAME),
        selector=strings("Or labels of the pods, in the release's namespace: the chart makes the headless Service."),
        port=whole("Port of the engines, of `service` and `selector`.", 1, 65535),
        enginesPerPod=whole("Most engines that a pod of adapters takes, of `service` and `selector`.", 1, 16),
        events=choice("Their cache events: where each reports them, or none and no prefix index.", "auto", "none"),
        eventPorts=array("Ports of these events that the NetworkPolicies open.", whole("A port.", 1, 65535)),
    ),
    "volume": group(
        "The models: at /models in the pod.",
        existingClaim=name("Shared claim with the models: ReadWriteMany, or ReadOnlyMany with readOnly."),
        hostPath=text("Or a folder of the node, which exists.", pattern="^(/[^:]+)?$"),
        image=text("Or an OCI image with the files, read only (Kubernetes' ImageVolume).", pattern=r"^\S*$"),
        readOnly=flag("Mount the existing claim, or the folder, read only."),
        subPath=text("Folder of the volume."),
        size=quantity(
            "Size of a claim for each worker; empty, without existingClaim: an emptyDir.",
            optional=True,
        ),
        storageClassName=name("Storage class of these claims; empty: the cluster's default."),
        whenDeleted=choice("Whether these claims, and those of `kvDisk`, outlive the release.", "Retain", "Delete"),
    ),
    "startupTimeoutSeconds": whole("How long a model may load before the pod is restarted.", 10, 86400),
    "drain": drain(
        "a worker", 25, "preStopSeconds", "Sleep before SIGTERM. Not needed: gateways avoid a draining worker."
    ),
    "resources": resources(
        "a worker, or of vLLM", claims="DRA claims of it, of `resourceClaims`; a worker with one runs on CUDA."
    ),
    "shmSize": quantity("Size of /dev/shm; empty: the runtime's, and 8Gi for vLLM.", optional=True),
    "runtimeClassName": name("Runtime class of the pods."),
    **pod(),
    **probes(loading=True),
    "updateStrategy": group(
        "How an upgrade replaces workers.",
        type=choice("One by one, or each when its pod is deleted.", "RollingUpdate", "OnDelete"),
        rollingUpdate=group("Of type RollingUpdate.", partition=whole("Pods below this number stay as they are.")),
    ),
    "autoscaling": autoscaling(
        whole("Mean of waiting prompt tokens above which a worker is added.", 1),
        "queuedTokensPerReplica",
        metric=choice(
            "What replicas follow: the workers needed for `gateway.scaleObjectiveSeconds`, or waiting prompt tokens.",
            "workersNeeded",
            "queuedTokens",
        ),
        minReplicas=whole("Never fewer; 0 needs `triggers`, as no request wakes a model without a worker.", 0),
        triggers=objects("Further triggers of KEDA, such as cron.", "type", "metadata"),
    ),
}

HOST: Final[Schema] = {
    "type": ["string", "object"],
    "minLength": 1,
    "required": ["host"],
    "additionalProperties": False,
    "properties": {
        "host": text("Host name.", minLength=1),
        "path": text("Path.", pattern="^/"),
        "pathType": choice("How it matches.", "Prefix", "Exact", "ImplementationSpecific"),
    },
}

RELABELING: Final = group(
    "A rule, as the Prometheus operator defines it.",
    sourceLabels=array("Labels that are joined.", text("A label.")),
    separator=text("Between them."),
    targetLabel=text("Label that is written."),
    regex=text("Expression that the joined labels match."),
    modulus=whole("For the action hashmod.", 1),
    replacement=text("What is written."),
    action=text("What is done; replace when it is not set."),
)

VALUES: Final = group(
    "Values of the chart headstart.",
    ("models",),
    **{
        "global": group(
            "What parent charts set for all of their charts.",
            imageRegistry=text("Registry of the images whose `repository` names none.", pattern=r"^([^\s/]\S*)?$"),
            imagePullSecrets=array(
                "Further secrets for pulling images.", group("A secret.", ("name",), name=name("Its name."))
            ),
        )
    },
    nameOverride=text("Replaces the chart's name in labels and names.", pattern=NAME, maxLength=30),
    fullnameOverride=text("Replaces the prefix of all names.", pattern=NAME, maxLength=30),
    ipFamily=choice("Address family on which pods listen and workers announce themselves.", "IPv4", "IPv6"),
    commonLabels=strings("Labels of every object."),
    commonAnnotations=strings("Annotations of every object; pods have `podAnnotations`."),
    imagePullSecrets=array("Secrets for pulling images.", group("A secret.", ("name",), name=name("Its name."))),
    clusterSecret=group(
        "The secret that gateways and workers share. It keys the tenants' salts; a worker with another one is refused.",
        existingSecret=name("Secret that holds it; empty: one is generated and kept over upgrades."),
        key=text("Its key in the Secret.", minLength=1),
    ),
    apiKeys=group(
        "Who may use the API.",
        enabled=flag("Whether the API asks for a key; without, whoever reaches a gateway may use it."),
        existingSecret=name("Secret with the file of keys; empty: one key is generated and kept over upgrades."),
        key=text("The key file's key in the Secret: TOML with digests, as `headstart keys` makes it.", minLength=1),
        plainKey=text(
            "Key of the Secret with one API key in plain text, for `helm test` only.",
            minLength=1,
        ),
    ),
    opsKey=group(
        "Who may drain a gateway and drain or purge workers through the ops port.",
        enabled=flag("Whether there is a key for it; without, the ops port can be read and changes nothing."),
        existingSecret=name("Secret with the key; empty: one is generated and kept over upgrades."),
        key=text("Its key in the Secret.", minLength=1),
    ),
    tls=group(
        "TLS; certificates reload when their Secrets change. For Redis see `redis`.",
        gateway=group(
            "The API and the ops port.",
            secret=name("Secret with tls.crt and tls.key; empty: plain HTTP."),
            caKey=text("Key of its CA in the Secret, for `helm test` and Prometheus; empty: a public CA."),
            name=text("A DNS name that the certificate is for, in the cluster too.", pattern=DNS_NAME),
        ),
        workers=group(
            "Between gateways and workers, on top of the token that workers ask for.",
            secret=name("Secret with tls.crt, tls.key and the CA; empty: plain HTTP. All workers share it."),
            caKey=text("Key of the CA in the Secret; gateways mount only this key.", minLength=1),
            name=text("The DNS name that the certificate is for.", pattern=DNS_NAME),
        ),
    ),
    logging=group(
        "The logs of gateways and workers, on standard error. They hold no prompts.",
        level=choice("The least severe that is written.", "debug", "info", "warning", "error"),
        format=choice("One JSON object a line, or text.", "json", "text"),
        access=flag("Whether gateways write a line for each answer."),
    ),
    tracing=group(
        "OpenTelemetry traces of gateways and workers.",
        endpoint=text(
            "OTLP over HTTP, e.g. http://collector:4318; empty: none, or OTEL_* in extraEnv.",
            pattern=r"^$|^https?://[^\s/]+(/\S*)?$",
        ),
    ),
    models=array(
        "The models; each gets a StatefulSet of workers. None: workers from elsewhere join through Redis.",
        group(
            "A model: its name and source, and any key of `worker`.",
            ("name",),
            name=text(
                "Name of the entry: part of the names of its objects.",
                pattern="^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
                maxLength=20,
            ),
            source=text(
                "A Hugging Face id, or a GGUF file or folder under /models. With `external`: its tokenizer, if not "
                "the one that the engine reports.",
                minLength=1,
            ),
            **{key: {"$ref": f"#/definitions/worker/properties/{key}"} for key in WORKER},
        ),
    ),
    worker={"$ref": "#/definitions/worker"},
    gateway=group(
        "The gateways.",
        image=image("the gateways", "Tag of the image; empty: the chart's appVersion."),
        replicas=whole("Gateways.", 1),
        policy=choice("Routing policy.", *POLICIES),
        scaleObjectiveSeconds={
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Wait of a queue that is short enough: what waits longer counts for the workers needed.",
        },
        workerNetworks=array(
            "Networks in which gateways look for workers; empty: private ones.",
            text("A network.", pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"),
        ),
        opsHosts=array(
            "Further host names of the ops port; its Service's and addresses always work.",
            text("A name, without scheme and port.", pattern=r"^[A-Za-z0-9._-]{1,253}$"),
        ),
        usageLog=group(
            "A line of JSON for each request, by tenant and key: /usage/POD.jsonl, full files as POD.jsonl.TIME.",
            enabled=flag("Whether gateways write it."),
            existingClaim=name(
                "ReadWriteMany claim for the logs of all pods; empty: an emptyDir, which ends with the pod."
            ),
        ),
        drain=drain(
            "a gateway", 15, "noticeSeconds", "Time in which it is not ready and still serves: load balancers drop it."
        ),
        resources=resources("a gateway", claims="DRA claims of it, of `resourceClaims`."),
        **pod(),
        **probes(),
        strategy=group(
            "How an upgrade replaces gateways.",
            type=choice("One by one, or all at once.", "RollingUpdate", "Recreate"),
            rollingUpdate=group(
                "Of type RollingUpdate.",
                maxSurge=count_or_percentage("Gateways above `replicas`, or a percentage of them.", 0),
                maxUnavailable=count_or_percentage("Gateways below it.", 0),
            ),
        ),
        autoscaling=autoscaling(
            whole("Target for kind hpa, in percent of the CPU request.", 1, 100),
            "targetCPUUtilization",
            requestsInFlightPerReplica=whole("Target for kind keda.", 1),
        ),
        service=group(
            "The Service of the OpenAI API. The ops port has a headless Service of its own.",
            type=choice("Its type.", "ClusterIP", "NodePort", "LoadBalancer"),
            port=whole("Its port.", 1, 65535),
            nodePort=whole("Its port of the nodes; 0: any.", 0, 65535),
            loadBalancerIP=text("Address of the load balancer, where the cloud obeys it.", pattern=r"^[0-9a-fA-F.:]*$"),
            loadBalancerClass=text("Controller of the load balancer; empty: the cluster's default."),
            loadBalancerSourceRanges=array("Networks that may connect to the load balancer.", {"type": "string"}),
            externalTrafficPolicy=choice(
                "`Local` keeps the caller's address; empty: the cluster's default.", "", "Cluster", "Local"
            ),
            annotations=strings("Its annotations."),
        ),
        ingress=group(
            "An Ingress for /v1. Switch off response buffering and raise the read timeout in its annotations.",
            enabled=flag("Whether there is one."),
            className=name("Its class; empty: the cluster's default."),
            annotations=strings("Its annotations."),
            hosts=array("Its host names; or a host, path (/v1) and pathType (Prefix) each.", HOST),
            tls=array("Its certificates.", free("hosts and secretName.")),
        ),
        httpRoute=group(
            "A Gateway API route for /v1.",
            enabled=flag("Whether there is one."),
            annotations=strings("Its annotations."),
            parentRefs=array("The Gateways it attaches to.", {"type": "object", "required": ["name"]}),
            hostnames=array("Its host names.", {"type": "string", "minLength": 1}),
            requestTimeout=text("Longest request; 0s: none.", pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"),
        ),
    ),
    redis=group(
        "The shared prefix index and registry. It is a hint: without it requests are served, but routed blindly.",
        mode=choice("One in the release, one elsewhere, or none at all.", "builtin", "external", "none"),
        prefix=text("Prefix of every key: one for each fleet that shares a Redis.", pattern=r"^[A-Za-z0-9._-]{1,64}$"),
        shards=whole("Slots over which the index is spread in a Redis Cluster.", 1, 1024),
        existingSecret=name("Secret with the passwords; empty: generated (builtin), or none (external)."),
        gatewayUsername=text("ACL user of the gateways; empty: Redis' default user.", pattern=r"^[A-Za-z0-9._-]*$"),
        gatewayPasswordKey=text("Key of its password in the Secret.", minLength=1),
        limitsUsername=text(
            "ACL user by which gateways count the use of API keys, with their password; empty: their other user.",
            pattern=r"^[A-Za-z0-9._-]*$",
        ),
        workerUsername=text("ACL user of the workers; empty: Redis' default user.", pattern=r"^[A-Za-z0-9._-]*$"),
        workerPasswordKey=text("Key of its password in the Secret.", minLength=1),
        builtin=group(
            "The Redis of the release: one pod, nothing on disk; workers write the index again when it restarts.",
            image=image("Redis", "Tag of the image. Redis 7.0 or newer."),
            memoryMiB=whole("Its memory, three quarters for data; 100 MiB hold about a million blocks.", 64),
            cpuRequest=quantity("CPUs reserved."),
            tlsSecret=name("Secret with tls.crt, tls.key and ca.crt; empty: no TLS."),
            **security_contexts(),
            **placement(),
        ),
        external=group(
            "A Redis elsewhere, 6.2 or newer.",
            url=text(
                "URL: redis://, rediss://, redis+sentinel:// or redis+cluster://, without credentials.",
                pattern=r"^$|^(redis|rediss|rediss?\+sentinel|redis\+cluster|rediss\+cluster)://[^\s]+$",
            ),
            ports=array("Ports that the NetworkPolicies open towards it.", whole("A port.", 1, 65535), minItems=1),
            caSecret=name("Secret with the CA of its certificate; empty: the system's."),
            caKey=text("Key of the CA in the Secret.", minLength=1),
        ),
    ),
    serviceAccount=group(
        "The account of all pods. Nothing here talks to the Kubernetes API; no token is mounted.",
        create=flag("Whether one is created."),
        name=name("Its name; empty: the release's, or `default` when none is created."),
        annotations=strings("Its annotations."),
    ),
    networkPolicy=group(
        "Default deny for every pod of the release, and what is needed.",
        enabled=flag("Whether there are NetworkPolicies. Without them, every pod can read metrics."),
        clients=array("Who may call the API (NetworkPolicy peers); empty: everybody.", free("A peer.")),
        monitoring=array("Who may read the metrics of gateways and workers.", free("A peer.")),
        extraGatewayEgress=array("Further egress rules of gateways.", free("A rule.")),
        extraWorkerEgress=array("Further egress rules of workers.", free("A rule.")),
    ),
    metrics=group(
        "For a Prometheus operator and a Grafana.",
        serviceMonitor=group(
            "Scraping of gateways and workers.",
            enabled=flag("Whether there are ServiceMonitors."),
            interval=text("How often.", pattern="^[0-9]+(ms|s|m)$"),
            scrapeTimeout=text(
                "Time for an answer, at most the interval; empty: Prometheus'.", pattern="^([0-9]+(ms|s|m))?$"
            ),
            namespace=name("Namespace of the ServiceMonitors; empty: the release's."),
            labels=strings("Labels by which your Prometheus selects them."),
            relabelings=array("Rules for a target's labels before a scrape.", RELABELING),
            metricRelabelings=array("Rules for series after it.", RELABELING),
        ),
        prometheusRule=group(
            "The alerts.",
            enabled=flag("Whether there is a PrometheusRule."),
            labels=strings("Labels by which your Prometheus selects it."),
        ),
        dashboard=group(
            "The Grafana dashboard.",
            enabled=flag("Whether there is a ConfigMap with it."),
            labels=strings("Labels by which Grafana's sidecar finds it."),
            annotations=strings("Annotations, such as the folder."),
        ),
    ),
    extraObjects=array("Further objects of the release; they may use template syntax.", {"type": ["object", "string"]}),
)


def schema() -> Schema:
    """Return the contents of values.schema.json."""
    worker = group("The workers.", **WORKER)
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"worker": worker}}
    return head | VALUES
