"""Subscriptions that no dispatcher owns. What only an owner knows makes an instance take the
subscription: a page asks for it only after the reader has agreed.
"""

from seqgate.api.dispatcher.v1 import dispatcher_pb2
from seqgate.services.console.pages.query import subscription_of
from seqgate.services.console.pages.visit import Query, Values, Visit


class NotOwned(Exception):
    """No instance owns the subscription that a page is about."""


async def check_owned(visit: Visit, names: Values) -> None:
    """Raises NotOwned."""
    request = dispatcher_pb2.GetSubscriptionRequest(**names)
    if not (await visit.calls.call(request)).subscription.owner:
        raise NotOwned


async def taken(visit: Visit, form: Query) -> str:
    """Have an instance take a subscription. Back to the page that needs it."""
    names = subscription_of(visit.query)
    await visit.calls.call(dispatcher_pb2.ReportRequest(**names, max_keys=1))
    return form.get("next", "/")
