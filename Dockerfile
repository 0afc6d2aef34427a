# Three images from one file, by --target:
#   gateway   (default) no torch, no model files       worker   --build-arg DEVICE=cpu|cuda
# Production builds pin the base by digest: --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim
ARG DEVICE=cpu

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/build.lock requirements/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --require-hashes --no-deps -r requirements/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY cache/ cache/
COPY server/ server/
COPY worker/ worker/
COPY benchmarks/ benchmarks/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS gateway-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/gateway.lock /requirements/
RUN python3 -m venv /opt/headstart \
 && /opt/headstart/bin/pip install --require-hashes --no-deps --only-binary :all: -r /requirements/gateway.lock
COPY --from=build /wheels/ /wheels/
# pip and setuptools leave with the last install: what the image does not hold cannot be misused.
RUN /opt/headstart/bin/pip install --no-deps --no-index /wheels/*.whl \
 && /opt/headstart/bin/pip uninstall --yes setuptools pip

FROM ${PYTHON_IMAGE} AS worker-packages
ARG DEVICE
# CPU builds of torch are not on PyPI. Say where they are with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS (docs/kubernetes.md).
ARG PIP_EXTRA_INDEX_URL=""
ARG PIP_FIND_LINKS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/worker-cpu.lock requirements/worker-cuda.lock /requirements/
RUN python3 -m venv /opt/headstart \
 && /opt/headstart/bin/pip install --require-hashes --no-deps --only-binary :all: \
    -r "/requirements/worker-${DEVICE}.lock"
COPY --from=build /wheels/ /wheels/
RUN /opt/headstart/bin/pip install --no-deps --no-index /wheels/*.whl \
 && /opt/headstart/bin/pip uninstall --yes setuptools pip
# Kernels for every instruction set of a CPU, so that the image needs no compiler.
# hadolint ignore=DL3008
RUN if [ "${DEVICE}" = cpu ]; then \
      { command -v g++ || { apt-get update && apt-get install --yes --no-install-recommends g++; }; } \
   && /opt/headstart/bin/python -P -m worker.kernels.cpu \
   && rm -rf /var/lib/apt/lists/*; \
    fi

FROM ${PYTHON_IMAGE} AS runtime
ENV PATH=/opt/headstart/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1 \
    HOME=/tmp TMPDIR=/tmp
WORKDIR /
STOPSIGNAL SIGTERM

FROM runtime AS worker
ARG DEVICE
ENV TRITON_CACHE_DIR=/tmp/triton
# Triton compiles a small C launcher for each kernel when it is first used.
# hadolint ignore=DL3008
RUN if [ "${DEVICE}" = cuda ]; then \
      apt-get update \
   && apt-get install --yes --no-install-recommends gcc libc6-dev \
   && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=worker-packages /opt/headstart /opt/headstart
# A named volume takes this owner: docker run -v kv:/kv ... --kv-disk /kv
RUN install -d -o 10001 -g 10001 -m 0700 /kv
USER 10001:10001
EXPOSE 8100
HEALTHCHECK --interval=10s --timeout=6s --start-period=1800s --retries=3 \
  CMD ["python3", "-I", "-c", "import ssl, urllib.request as r\ntry: r.urlopen('http://127.0.0.1:8100/health/live', timeout=5)\nexcept Exception: r.urlopen('https://127.0.0.1:8100/health/live', timeout=5, context=ssl._create_unverified_context())"]
ENTRYPOINT ["headstart", "worker"]
CMD ["--host", "0.0.0.0"]

FROM runtime AS gateway
COPY --from=gateway-packages /opt/headstart /opt/headstart
USER 10001:10001
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 \
  CMD ["python3", "-I", "-c", "import ssl, urllib.request as r\ntry: r.urlopen('http://127.0.0.1:8000/health/live', timeout=5)\nexcept Exception: r.urlopen('https://127.0.0.1:8000/health/live', timeout=5, context=ssl._create_unverified_context())"]
ENTRYPOINT ["headstart", "gateway"]
CMD ["--host", "0.0.0.0"]
