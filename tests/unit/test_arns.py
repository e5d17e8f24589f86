"""Reading the AWS Region from the URL of a queue."""

import pytest

from celery_sqs_backoff.sqs.arns import region_of

HOSTS = {
    "sqs.eu-central-1.amazonaws.com": "eu-central-1",
    "sqs-fips.us-gov-west-1.amazonaws.com": "us-gov-west-1",
    "sqs.cn-north-1.amazonaws.com.cn": "cn-north-1",
    "sqs.us-east-1.api.aws": "us-east-1",
    "vpce-0a-1b.sqs.eu-west-3.vpce.amazonaws.com": "eu-west-3",
    "eu-west-1.queue.amazonaws.com": "eu-west-1",
    "queue.amazonaws.com": "us-east-1",
    "sqs.ap-south-1.localhost.localstack.cloud": "ap-south-1",
    "localhost": None,
    "app-sqs-1": None,
    "moto-server-0.moto.svc": None,
    "localstack.pr-shop-12.svc.cluster.local": None,
}


@pytest.mark.parametrize(("host", "region"), HOSTS.items(), ids=HOSTS)
def test_region_of_host(host, region):
    """``region_of`` finds the Region in the host's name, and returns None if it has none."""
    assert region_of(host) == region
