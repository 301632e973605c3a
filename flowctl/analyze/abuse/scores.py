"""From evidence to verdicts: aged sums, standing, the scores of addresses and subnets.

Evidence is summed per address and kind, each piece halved for every `Weights.half_life_s` of age, and the sum is
divided by one plus the hours in which connections of that address behaved (`flowctl.analyze.abuse.weights` has the
reasons). Sums are of whole numbers (millionths of an occurrence), so that the result is the same in whichever order
rows come; evidence ages as the newest of its minute.

All of it is one function of pandas over the rows of whole subnets (`scores`): called as it is where there are few, and
by Spark's workers, each for its subnets, where there are many.

What is said of an address, `verdict`:

- ``ban``: nobody behaves there, and what harms is enough.
- ``shared``: it would be enough, but others behave there: new connections are limited, and nobody is kept out.
- ``limit``: enough, but only with evidence that never bans (`weights.MILD`): the same.
- ``subnet_ban``: as ban, covered by that of its whole subnet, where nearly all are abusive and nobody honest was seen.
- ``allowed``, ``no_address``: it would be one of these, but it is on the allow list, or not an address of a peer.
- ``watch``: half of it; ``ok``: less.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import functions as f

from flowctl.analyze.abuse.evidence import EVIDENCE
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.job import arrow_schema
from flowctl.analyze.records import addresses
from flowctl.core.server.bans import BanAction
from flowctl.core.server.guilt import PROOF
from flowctl.core.text.addresses import Network
from flowctl.records.telemetry.schema import OPENS_EVERY_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from flowctl.analyze.job import Parts

MICRO: Final = 1_000_000
SCORE_COLUMNS: Final = {
    "kind": "string",  # address or subnet
    "address": "string",  # as recorded; of a subnet: its network
    "cidr": "string",  # what a ban would name; null: nothing can be banned
    "subnet": "string",
    **dict.fromkeys(("score", "points", "standing_hours"), "double"),  # points: before they are divided by standing
    **dict.fromkeys(("people", "connections"), "bigint"),  # people: connections that are open and behave
    **dict.fromkeys(("addresses", "abusive_addresses"), "bigint"),  # seen in a subnet
    "evidence": "string",  # JSON: kind -> decayed number of occurrences
    **dict.fromkeys(("first_seen", "last_seen"), "timestamp"),
    "verdict": "string",
    "action": "string",  # ban or limit, as the list has it; null: not on it by itself
    "banned": "boolean",
}
"""Columns of `abuse_scores`; one row per address, of IPv6 per /64, and per subnet with an abusive one of these."""
ACTIONS: Final = {"ban": BanAction.BAN, "shared": BanAction.LIMIT, "limit": BanAction.LIMIT}
"""Verdicts that make a line of the list."""
NEVER_READ: Final = "never_read"
DEAF: Final = "deaf_close"
SLOW: Final = (DEAF, NEVER_READ)
"""Evidence that bans, and is about being slow, which is what limits are for."""
_CROWD: Final = 1000
"""People at an address from which on it is not limited: they could not come back within minutes, at two per second."""
_WAITING: Final = 20
"""Who wait at an address at once, from which on they are people: fewer may be an attacker's own, at no cost."""
_BACK_S: Final = 60.0
"""Who was ended while waiting comes back within this."""
_OFTEN: Final = 0.05
"""Of a shared address's connections: phones that are lost as they connect are fewer."""
_BROADCAST: Final = ipaddress.ip_address("255.255.255.255")
_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
"""Of translators within networks (RFC 8215): behind one /64 of it may be all of IPv4."""
_SUBNET_LENGTHS: Final = {4: 24, 6: 48}
_SILENT_S: Final = OPENS_EVERY_S + 60
"""A connection that is open has a row each `OPENS_EVERY_S`, in a file some seconds later; without, it has gone."""
_CLOCKS_S: Final = 3600.0
"""Clocks of servers differ by less: one that is ahead of the others must not make all their viewers gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseRules:
    """By what to judge."""

    weights: Weights
    seen_us: int  # end of the data, microseconds since the epoch
    now_us: int
    since_us: int = 0  # begin of the window: what is older tells who behaved, and is no evidence against anybody
    spared: tuple[Network, ...] = ()  # networks that are neither banned nor limited

    def left(self, us: Any) -> Any:
        """Return what is left of what was then; what is newer than now, by a clock that is ahead, is of now."""
        return 0.5 ** (np.maximum(0, self.now_us - us) / (self.weights.half_life_s * 1e6))

    def spares(self, network: Network) -> bool:
        return any(network.version == other.version and network.overlaps(other) for other in self.spared)


def all_scores(parts: Parts, rules: AbuseRules) -> pd.DataFrame | DataFrame:
    """Return the scores of all addresses and subnets of part `evidence`, with `SCORE_COLUMNS`."""
    if parts.small:
        return scores(parts.pandas(EVIDENCE.name), rules)
    found = parts.table(EVIDENCE.name)
    known = nodes(found)
    columns = ", ".join(f"{name} {kind}" for name, kind in SCORE_COLUMNS.items())
    schema = arrow_schema(SCORE_COLUMNS)

    def judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if rows := list(batches):
            made = scores(pa.Table.from_batches(rows).to_pandas(), rules, known)
            yield from pa.Table.from_pandas(made, schema, preserve_index=False).to_batches()

    address = f.col("address")
    place = f.coalesce(addresses.subnet(address, addresses.unit_digits(address)), address)
    return found.where(address.isNotNull()).repartition(place).mapInArrow(judged, columns)


def begin_us(parts: Parts) -> int:
    return 0 if parts.since is None else int(parts.since.timestamp()) * MICRO


def nodes(found: pd.DataFrame | DataFrame) -> pd.DataFrame:
    """Return of each node when its newest process began, and when it was heard of last, by its own clock, us."""
    if not isinstance(found, pd.DataFrame):
        who = f.when(f.col("address").isNotNull(), "").alias("address")
        newest = found.where(f.col("node").isNotNull()).groupBy("node", who).agg(f.max("last_seen").alias("last_seen"))
        found = newest.toArrow().to_pandas()
    last_us = _us(found["last_seen"])
    began_us = last_us.where(found["address"].isna(), 0)
    return pd.DataFrame({"began": began_us, "heard": last_us}).groupby(found["node"]).max()


def scores(found: pd.DataFrame, rules: AbuseRules, known: pd.DataFrame | None = None) -> pd.DataFrame:
    each = address_scores(found, rules, nodes(found) if known is None else known)
    subnets = _subnet_scores(each, rules)
    covered = each["subnet"].isin(subnets["subnet"][subnets["verdict"] == "ban"])
    each["verdict"] = each["verdict"].mask(covered & (each["verdict"] == "ban"), "subnet_ban")
    both = pd.concat([each, subnets], ignore_index=True)
    both["action"] = both["verdict"].map({name: action.value for name, action in ACTIONS.items()})
    both["banned"] = both["verdict"] == "ban"
    both = both[both["addresses"] > 0]
    digits = dict.fromkeys(("score", "points", "standing_hours"), 3)
    return both.round(digits)[list(SCORE_COLUMNS)]


def address_scores(found: pd.DataFrame, rules: AbuseRules, known: pd.DataFrame) -> pd.DataFrame:
    """Return the score of every address, by address; `verdict` not yet with what subnets change."""
    weights, found = rules.weights, found[found["address"].notna()]
    found = found.assign(harmful=found["kind"].isin(_kinds(found, weights)), last_us=_us(found["last_seen"]))
    inside = found["last_us"] >= rules.since_us
    who = found.assign(counted=found["opened"].where(inside, 0), addresses=inside.astype("int64")).groupby("address")
    who = who.agg(
        connections=("counted", "sum"),
        first_seen=("first_seen", "min"),
        last_seen=("last_seen", "max"),
        addresses=("addresses", "max"),  # 0: of one that was there only before the window
    )
    who = who.join(_standing(found, rules, known)).fillna({"people": 0, "open": 0, "standing_hours": 0.0})
    who["connections"] += who["open"]
    shared = (who["people"] > 0) | (who["standing_hours"] >= weights.shared_hours)
    sums = (
        _points(found[inside], who.index[shared], rules).reindex(who.index).astype({"evidence": object})
    )  # also of none
    who = who.join(sums).fillna(dict.fromkeys(sums.columns, 0.0) | {"evidence": "{}"})
    hours, threshold = 1 + who["standing_hours"], weights.threshold
    who["score"] = (who["points"] / hours).round(3)
    deaf = (who["never"] * weights.of(NEVER_READ) >= threshold) & (who["never"] >= _OFTEN * who["connections"])
    enough, proven = who["score"] >= threshold, (who["proof"] >= threshold) | deaf
    harms = (who["harm"] / hours).round(3) >= threshold
    # In this order: where anybody behaves, the two last do not come into question.
    limited = shared & (enough | proven) & (who["people"] <= _CROWD)
    said = np.select([limited, shared, harms, enough], ["shared", "", "ban", "limit"], "")
    lesser = np.where(who["score"] >= threshold / 2, "watch", "ok")
    who = who.reset_index()
    places = [_place(address) for address in who["address"]]
    who["cidr"] = [None if unit is None else str(unit) for unit, _ in places]
    who["subnet"] = [subnet for _, subnet in places]
    who["verdict"] = [
        ("no_address" if unit is None else "allowed" if rules.spares(unit) else verdict) if verdict else other
        for (unit, _), verdict, other in zip(places, said, lesser, strict=True)
    ]
    who["abusive_addresses"] = (who["verdict"] == "ban").astype("int64")
    return who.assign(kind="address").astype({"people": "int64", "connections": "int64"})


def _points(found: pd.DataFrame, shared: pd.Index[Any], rules: AbuseRules) -> pd.DataFrame:
    """Return by address: points, of these harm (kinds that can ban) and proof, how many never read, evidence."""
    weights, harm = rules.weights, _kinds(found, rules.weights)
    # What cuts many of an address in one minute is their line: it counts once.
    at_once = found.groupby(["address", "kind", "minute"])["amount"].transform("sum").where(found["kind"] == DEAF, 1)
    micro = (found["amount"] / at_once * rules.left(found["last_us"]) * MICRO).astype("int64")
    kinds = micro.groupby([found["address"], found["kind"]]).sum().rename("micro").reset_index()
    points = (kinds["micro"] * kinds["kind"].map(weights.of).astype(float)).astype("int64")
    points = points.where(~kinds["address"].isin(shared), points.clip(upper=int(weights.threshold * MICRO)))
    proof = [kind for kind in harm if weights.of(kind) >= PROOF]
    kinds = kinds.assign(
        points=points,
        harm=points.where(kinds["kind"].isin(harm), 0),
        proof=points.where(kinds["kind"].isin(proof), 0),
        never=kinds["micro"].where(kinds["kind"] == NEVER_READ, 0),
    )
    sums = kinds.groupby("address")[["points", "harm", "proof", "never"]].sum() / MICRO
    told: dict[str, dict[str, float]] = {address: {} for address in sums.index}
    for address, kind, count in zip(kinds["address"], kinds["kind"], kinds["micro"], strict=True):
        told[address][kind] = round(count / MICRO, 3)
    return sums.assign(evidence=[json.dumps(amounts, separators=(",", ":")) for amounts in told.values()])


def _standing(found: pd.DataFrame, rules: AbuseRules, servers: pd.DataFrame) -> pd.DataFrame:
    """Return who behaves at each address.

    A connection counts with the time for which it played or published, if it did nothing that bans and was not cut. One
    that is open counts up to the end of the data, and as one who is there now if it has played for `Weights.settled_s`.
    One whose server went away, so that nobody told its end, counts up to when it was last seen. Those who wait for a
    show are people too, from `_WAITING` at once on; that they waited is no standing.
    """
    weights, seen_us = rules.weights, min(rules.seen_us, rules.now_us)
    single = found[found["node"].notna()]
    single = single.assign(begun_us=_us(single["begun"]))
    one = single.groupby(["node", "conn_id", "address"], as_index=False).agg(
        **{name: (name, "max") for name in ("opened", "good_ms", "begun_us", "last_us", "harmful", "waits")}
    )
    ended, known, last_us = one["opened"] > 0, one["begun_us"] > 0, one["last_us"]
    node = servers.reindex(one["node"]).set_index(one.index)
    silent_us = (node["heard"] - _SILENT_S * 1e6).clip(lower=seen_us - _CLOCKS_S * 1e6)
    gone = (last_us < silent_us) | (last_us < node["began"])
    until_us = last_us.where(ended | gone, seen_us)
    lasted_ms = (until_us - one["begun_us"]) / 1000
    open_ms = lasted_ms.clip(lower=weights.play_s * 1000).where(known, 0)
    ms = one["good_ms"].where(ended, open_ms).where(~one["harmful"], 0)
    one["standing_ms"] = (ms * rules.left(until_us)).astype("int64")
    one["open"] = known & ~ended
    one["people"] = one["open"] & ~one["harmful"] & ~gone & (lasted_ms >= weights.settled_s * 1000)
    still = (last_us >= seen_us - _BACK_S * 1e6).where(ended, ~gone)
    one["waiting"] = (one["waits"] > 0) & ~known & ~one["harmful"] & still
    sums = one.groupby("address")[["people", "waiting", "open", "standing_ms"]].sum()
    waiting = sums.pop("waiting")
    sums["people"] += waiting.where(waiting >= _WAITING, 0)
    return sums.assign(standing_hours=sums.pop("standing_ms") / 3_600_000)


def _subnet_scores(each: pd.DataFrame, rules: AbuseRules) -> pd.DataFrame:
    """Return the score of every subnet that has an abusive address, or one that is allowed to be.

    A subnet is banned as a whole if at least `Weights.subnet_addresses` of its addresses, and at least
    `Weights.subnet_share` of those seen, are to be banned themselves, and nobody behaved in it: then what is left is
    not worth telling apart, and the next address of it will be abusive too. One allowed address in it, and it is not.
    Of IPv6 only the narrowest network that holds them is banned: a /48 may be 256 homes, each with its /56.
    """
    weights = rules.weights
    names = ("points", "standing_hours", "people", "connections", "addresses", "abusive_addresses", "allowed")
    found = each.assign(allowed=(each["verdict"] == "allowed").astype("int64")).groupby("subnet", as_index=False)
    sums = found.agg(
        **{name: (name, "sum") for name in names},
        first_seen=("first_seen", "min"),
        last_seen=("last_seen", "max"),
    )
    sums = sums[(sums["abusive_addresses"] > 0) | (sums["allowed"] > 0)].reset_index(drop=True)
    share = sums["abusive_addresses"] / sums["addresses"]
    enough = (sums["abusive_addresses"] >= weights.subnet_addresses) & (share >= weights.subnet_share)
    nobody = (sums["people"] == 0) & (sums["standing_hours"] == 0) & (sums["allowed"] == 0)
    spared = [rules.spares(ipaddress.ip_network(subnet)) for subnet in sums["subnet"]]
    whole = enough & nobody & ~np.array(spared, bool)
    counts = zip(sums["addresses"], sums["abusive_addresses"], strict=True)
    abusive = each[each["verdict"] == "ban"].groupby("subnet")["cidr"].agg(list)
    return sums.assign(
        kind="subnet",
        address=sums["subnet"],
        cidr=[
            _narrowest(abusive[subnet]) if ban and ":" in subnet else subnet
            for subnet, ban in zip(sums["subnet"], whole, strict=True)
        ],
        score=sums["points"] / (1 + sums["standing_hours"]),
        evidence=[f'{{"addresses":{all_},"abusive_addresses":{abusive}}}' for all_, abusive in counts],
        verdict=np.select([whole, sums["allowed"] > 0], ["ban", "allowed"], "ok"),
    )


def _narrowest(units: Sequence[str]) -> str:
    """Return the network that holds some /64s, and as little else as can be."""
    begins = [int(ipaddress.ip_network(unit).network_address) for unit in units]
    bits = (min(begins) ^ max(begins)).bit_length()
    return str(ipaddress.IPv6Network((min(begins) >> bits << bits, 128 - max(bits, 64))))


def attackers(
    parts: Parts, who: Collection[str], seen_us: int, weights: Weights | None = None
) -> tuple[set[tuple[str, int]], set[str]]:
    """Return whom the rules call attackers: what limits do to them is no reason for other limits."""
    rules = AbuseRules(weights=weights or Weights(), seen_us=seen_us, now_us=seen_us, since_us=begin_us(parts))
    if parts.small:
        found = parts.pandas(EVIDENCE.name)
        known = nodes(found)
    else:
        asked = f.broadcast(parts.spark.createDataFrame([(address,) for address in who], "address string"))
        table = parts.table(EVIDENCE.name)
        known, found = nodes(table), table.join(asked, "address", "left_semi").toArrow().to_pandas()
    found = found[found["address"].isin(who)]
    harm = [kind for kind in _kinds(found, rules.weights) if kind not in SLOW]
    direct = found[found["kind"].isin(harm) & found["node"].notna()]
    judged = address_scores(found, rules, known)
    return set(zip(direct["node"], direct["conn_id"], strict=True)), set(judged["address"][judged["verdict"] == "ban"])


def _kinds(found: pd.DataFrame, weights: Weights) -> list[str]:
    """Return the kinds of evidence that can lead to a ban; other evidence leads to a limit at most."""
    return [kind for kind in found["kind"].dropna().unique() if weights.bans(kind)]


def _place(address: str) -> tuple[Network | None, str | None]:
    """Return what a ban of an address would name, and its subnet; (None, None) of what is no address.

    None as well of what no peer can have, or what stands for all others: unspecified, groups, broadcast, a translator.
    """
    try:
        unit = ipaddress.ip_network(address)
    except ValueError:
        return None, None
    length, single = _SUBNET_LENGTHS[unit.version], unit.version == 4 and "/" not in address
    if single or (unit.prefixlen == 64 and address.endswith("::/64")):
        first = unit.network_address
        nobody = first.is_unspecified or first.is_multicast or first == _BROADCAST
        nobody = nobody or first in _TRANSLATED
        return None if nobody else unit, str(unit.supernet(new_prefix=length))
    return None, address if unit.prefixlen == length else None


def _us(moments: pd.Series[Any]) -> pd.Series[int]:
    """Return times in microseconds since the epoch; of none a number far below 0."""
    return pd.Series(moments.to_numpy("datetime64[us]").astype("int64"), moments.index)
