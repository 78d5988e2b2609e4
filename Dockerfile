# Verbatim on the CPU: docker build -t verbatim . && docker run --init -p 127.0.0.1:8000:8000 -e VERBATIM_API_KEY=... verbatim
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu "torch>=2.11,<2.14"
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/verbatim-*.whl)[serve]"
# One user without rights; models and quantized weights are kept in /home/verbatim/.cache, which a volume takes its
# owner from.
RUN useradd --create-home verbatim
USER verbatim
RUN mkdir /home/verbatim/.cache
WORKDIR /home/verbatim
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=3)"]
# SIGTERM lets requests in progress finish.
ENTRYPOINT ["verbatim"]
CMD ["serve", "--host", "0.0.0.0"]
