# Both images of kvtier: `--target operator` and `--target agent`. `make image` builds them.
#
# The base image is an argument; it needs Python 3.11 or newer with venv, and nothing else.
# What builds (uv, hatchling) stays in the stage `tools`, which the others mount and never copy, so
# no installer, cache or source tree is in an image, and several GB of packages are written once.
#
# The agent takes the native extension in from native/wheels, where `make image` puts it: the base
# image has no compiler. Without a wheel there the image is built without it, and works.
#
# Behind a mirror or a proxy: secret `build_env` is a shell file of variables (SSL_CERT_FILE,
# PIP_INDEX_URL, UV_DEFAULT_INDEX, ...), secret `build_ca` a bundle of certificates. Both exist during
# a step only.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PATH=/opt/kvtier/bin:$PATH

FROM base AS tools
WORKDIR /src
COPY requirements/build.lock requirements/
RUN --mount=type=secret,id=build_env --mount=type=secret,id=build_ca \
    set -a; if [ -f /run/secrets/build_env ]; then . /run/secrets/build_env; fi; \
    python3 -m venv /opt/tools \
 && /opt/tools/bin/python -m pip install --no-cache-dir --require-hashes -r requirements/build.lock
# buildah 1.28 (Debian 12) mounts a stage as it was before its last step; so the last does nothing.
RUN true

FROM tools AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY crds crds
COPY operator operator
COPY agent agent
COPY cli cli
# No network: everything that builds is installed already.
RUN /opt/tools/bin/python -m hatchling build -t wheel -d /dist

FROM base AS operator
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=requirements/operator.lock,target=/tmp/operator.lock \
    --mount=type=cache,target=/var/cache/uv \
    --mount=type=secret,id=build_env --mount=type=secret,id=build_ca \
    set -a; if [ -f /run/secrets/build_env ]; then . /run/secrets/build_env; fi; \
    export UV_CACHE_DIR="${UV_CACHE_DIR:-/var/cache/uv}" UV_LINK_MODE=copy UV_NO_CONFIG=1; \
    /opt/tools/bin/uv venv --quiet --python "$(command -v python3)" /opt/kvtier \
 && /opt/tools/bin/uv pip install --compile-bytecode --python /opt/kvtier --no-deps \
    --require-hashes -r /tmp/operator.lock
COPY --from=wheel /dist /opt/kvtier/dist
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    /opt/tools/bin/uv pip install --no-cache --no-config --python /opt/kvtier --offline --no-deps \
    --compile-bytecode /opt/kvtier/dist/*.whl \
 && rm -r /opt/kvtier/dist
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/opt/kvtier/bin/kvtier"]
CMD ["operator"]

FROM base AS agent
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=requirements/agent.lock,target=/tmp/agent.lock \
    --mount=type=cache,target=/var/cache/uv \
    --mount=type=secret,id=build_env --mount=type=secret,id=build_ca \
    set -a; if [ -f /run/secrets/build_env ]; then . /run/secrets/build_env; fi; \
    export UV_CACHE_DIR="${UV_CACHE_DIR:-/var/cache/uv}" UV_LINK_MODE=copy UV_NO_CONFIG=1; \
    /opt/tools/bin/uv venv --quiet --python "$(command -v python3)" /opt/kvtier \
 && /opt/tools/bin/uv pip install --python /opt/kvtier --no-deps \
    --require-hashes -r /tmp/agent.lock
COPY --from=wheel /dist /opt/kvtier/dist
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=native/wheels,target=/tmp/native \
    install="/opt/tools/bin/uv pip install --no-cache --no-config --python /opt/kvtier --offline --no-deps" \
 && $install /opt/kvtier/dist/*.whl \
 && rm -r /opt/kvtier/dist \
 && { $install --find-links /tmp/native kvtier-native \
      || echo "no wheel of the native extension for this image in native/wheels: built without it"; }
WORKDIR /
ENTRYPOINT ["/opt/kvtier/bin/kvtier"]
CMD ["agent"]
