"""A Spark Connect server, as a process: it prints a line when it is up, and ends with its input.

python -m tests.spark.connect_server PORT
"""

import sys

from tests.support.spark_classes import java_options, spark_session


def main(port: str) -> None:
    settings = {
        "spark.master": "local[2]",
        "spark.driver.memory": "512m",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
    }
    with spark_session("connect server", *java_options(), **settings):
        sys.stdout.write("up\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
