# A live RTMP server. Settings are mounted or given as FLOWCTL_ variables:
#   docker run -p 1935:1935 -v ./flowctl.toml:/etc/flowctl/flowctl.toml:ro flowctl
FROM python:3.11.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE requirements-dev.txt ./
COPY packaging/requirements ./packaging/
COPY flowctl ./flowctl
COPY servers ./servers
ARG EXTRAS=admin,media
# What pip fetches has the hashes of requirements-dev.txt: what builds flowctl, and what it needs.
RUN packaging/requirements hatchling > build.txt && packaging/requirements "${EXTRAS}" > needed.txt \
    && python -m venv /opt/build && python -m venv /opt/flowctl \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r build.txt \
    && /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index --wheel-dir /opt/build . \
    && /opt/flowctl/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r needed.txt \
    && /opt/flowctl/bin/pip install --no-cache-dir --no-deps --no-index /opt/build/flowctl-*.whl

FROM python:3.11.13-slim-bookworm
RUN useradd --uid 10001 --no-log-init --no-create-home --shell /usr/sbin/nologin flowctl \
    && install -d -o flowctl -m 0700 /run/flowctl /var/lib/flowctl
COPY --from=build /opt/flowctl /opt/flowctl
ENV PATH=/opt/flowctl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_RUNTIME_DIR=/run/flowctl \
    FLOWCTL_HOST=0.0.0.0
WORKDIR /var/lib/flowctl
USER 10001
EXPOSE 1935
STOPSIGNAL SIGTERM
# Asks over the socket of operations; with FLOWCTL_CONTROL=off: docker run --no-healthcheck, or a check of your own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["flowctl", "stats", "--json"]
ENTRYPOINT ["flowctl"]
CMD ["serve", "live", "--log-json"]
