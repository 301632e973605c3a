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
from math import inf
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from flowctl.analyze.abuse.evidence import EVIDENCE
from flowctl.analyze.abuse.weights import Weights
from flowctl.analyze.job import arrow_schema
from flowctl.analyze.models import run_text
from flowctl.analyze.records import addresses
from flowctl.analyze.viewers.sessions import ended_us
from flowctl.core.server.bans import BanAction
from flowctl.core.server.guilt import PROOF
from flowctl.core.text.addresses import NETWORK_BITS, Network

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
"""Verdicts that become a line of the ban list, with its action."""
NEVER_READ: Final = "never_read"
DEAF: Final = "deaf_close"
SLOW: Final = (DEAF, NEVER_READ)
"""Kinds of evidence that ban, but are about being slow, which is what limits are for."""
_CROWD_PEOPLE: Final = 1000
"""Most people at an address that may be limited: more could not come back within minutes, at two per second."""
_LEAST_WAITING: Final = 20
"""Least connections that wait at an address at once to count as people: fewer cost an attacker nothing."""
_RETURN_WITHIN_S: Final = 60.0
"""Time within which a viewer that was ended while waiting comes back."""
_DEAF_SHARE: Final = 0.05
"""Least share of an address's connections that never read for it to be proven deaf; phones that are lost as they
connect are fewer."""
_BROADCAST: Final = ipaddress.ip_address("255.255.255.255")
_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
"""Prefix of translators within networks (RFC 8215): behind one /64 of it may be all of IPv4."""
_LATE_S: Final = 60.0
"""Time after the end of a connection, as far as that is known, from which it has gone: files come some seconds late."""
_CLOCKS_S: Final = 3600.0
"""Most that clocks of servers differ: one that is ahead must not make the viewers of all others look gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbuseRules:
    """What a judgement depends on."""

    weights: Weights
    seen_us: int  # end of the data, microseconds since the epoch
    now_us: int
    since_us: int = 0  # begin of the window: older rows show who behaved, and are no evidence
    spared: tuple[Network, ...] = ()  # networks that are neither banned nor limited

    def decay_factor(self, us: Any) -> Any:
        """Return how much evidence from time `us` still counts, 0 to 1; times after now count as now."""
        return 0.5 ** (np.maximum(0, self.now_us - us) / (self.weights.half_life_s * 1e6))

    def spares(self, network: Network) -> bool:
        return any(network.version == other.version and network.overlaps(other) for other in self.spared)


def all_scores(parts: Parts, rules: AbuseRules) -> pd.DataFrame | DataFrame:
    """Return the scores of all addresses and subnets of part `evidence`, with `SCORE_COLUMNS`."""
    if parts.small:
        rows = parts.pandas(EVIDENCE.name)
        return scores(rows, rules, nodes(rows, parts))
    found = parts.table(EVIDENCE.name)
    known = nodes(found, parts)
    columns = ", ".join(f"{name} {kind}" for name, kind in SCORE_COLUMNS.items())
    schema = arrow_schema(SCORE_COLUMNS)

    def judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if rows := list(batches):
            made = scores(pa.Table.from_batches(rows).to_pandas(), rules, known)
            yield from pa.Table.from_pandas(made, schema, preserve_index=False).to_batches()

    text = "SELECT * EXCEPT (address), address AS peer_ip FROM found WHERE address IS NOT NULL"
    placed = addresses.with_unit(run_text(text, {"found": found}))
    text = "SELECT /*+ REPARTITION(place) */ * EXCEPT (subnet, peer_ip), coalesce(subnet, address) AS place FROM placed"
    return run_text(text, {"placed": placed}).mapInArrow(judged, columns)


def begin_us(parts: Parts) -> int:
    return 0 if parts.since is None else int(parts.since.timestamp()) * MICRO


def nodes(found: pd.DataFrame | DataFrame, parts: Parts) -> pd.DataFrame:
    """Return for each node, by its own clock in us, when its newest process began and when its last record was made."""
    if not isinstance(found, pd.DataFrame):
        text = """SELECT node, CASE WHEN address IS NOT NULL THEN '' END AS address, max(last_seen) AS last_seen
            FROM found WHERE node IS NOT NULL GROUP BY ALL"""
        found = run_text(text, {"found": found}).toArrow().to_pandas()
    last_us = _epoch_us(found["last_seen"])
    began_us = last_us.where(found["address"].isna(), 0)
    told = pd.DataFrame({"began": began_us, "heard": last_us}).groupby(found["node"]).max()
    heard_us = pd.Series({node: round(at.timestamp() * 1e6) for node, at in parts.heard.items()}, dtype="int64")
    told["heard"] = told["heard"].clip(lower=heard_us.reindex(told.index).fillna(0))
    return told


def scores(evidence: pd.DataFrame, rules: AbuseRules, known: pd.DataFrame) -> pd.DataFrame:
    each = address_scores(evidence, rules, known)
    subnets = _subnet_scores(each, rules)
    covered = each["subnet"].isin(subnets["subnet"][subnets["verdict"] == "ban"])
    each["verdict"] = each["verdict"].mask(covered & (each["verdict"] == "ban"), "subnet_ban")
    both = pd.concat([each, subnets], ignore_index=True)
    both["action"] = both["verdict"].map({name: action.value for name, action in ACTIONS.items()})
    both["banned"] = both["verdict"] == "ban"
    both = both[both["addresses"] > 0]
    digits = dict.fromkeys(("score", "points", "standing_hours"), 3)
    return both.round(digits)[list(SCORE_COLUMNS)]


def address_scores(evidence: pd.DataFrame, rules: AbuseRules, known: pd.DataFrame) -> pd.DataFrame:
    """Return the score of every address, by address; `verdict` does not regard subnets yet."""
    weights, evidence = rules.weights, evidence[evidence["address"].notna()]
    harmful, last_us = evidence["kind"].isin(_kinds(evidence, weights)), _epoch_us(evidence["last_seen"])
    evidence, inside = evidence.assign(harmful=harmful, last_us=last_us), last_us >= rules.since_us
    per_address = evidence.assign(counted=evidence["opened"].where(inside, 0), addresses=inside.astype("int64"))
    per_address = per_address.groupby("address").agg(
        connections=("counted", "sum"),
        first_seen=("first_seen", "min"),
        last_seen=("last_seen", "max"),
        addresses=("addresses", "max"),  # 0: it was there only before the window
    )
    standing = _standing(evidence, rules, known)
    per_address = per_address.join(standing).fillna({"people": 0, "open": 0, "standing_hours": 0.0})
    per_address["connections"] += per_address["open"]
    shared = (per_address["people"] > 0) | (per_address["standing_hours"] >= weights.shared_hours)
    points = _points(evidence[inside], per_address.index[shared], rules)
    sums = points.reindex(per_address.index).astype({"evidence": object})  # addresses without points have a row too
    per_address = per_address.join(sums).fillna(dict.fromkeys(sums.columns, 0.0) | {"evidence": "{}"})
    hours, threshold = 1 + per_address["standing_hours"], weights.threshold
    per_address["score"] = (per_address["points"] / hours).round(3)
    never = per_address["never"]
    deaf = (never * weights.of(NEVER_READ) >= threshold) & (never >= _DEAF_SHARE * per_address["connections"])
    enough, proven = per_address["score"] >= threshold, (per_address["proof"] >= threshold) | deaf
    harms = (per_address["harm"] / hours).round(3) >= threshold
    # The order matters: where people behave, the last two do not apply.
    limited = shared & (enough | proven) & (per_address["people"] <= _CROWD_PEOPLE)
    said = np.select([limited, shared, harms, enough], ["shared", "", "ban", "limit"], "")
    lesser = np.where(per_address["score"] >= threshold / 2, "watch", "ok")
    per_address = per_address.reset_index()
    places = [_unit_and_subnet(address) for address in per_address["address"]]
    per_address["cidr"] = [None if unit is None else str(unit) for unit, _ in places]
    per_address["subnet"] = [subnet for _, subnet in places]
    per_address["verdict"] = [
        ("no_address" if unit is None else "allowed" if rules.spares(unit) else verdict) if verdict else other
        for (unit, _), verdict, other in zip(places, said, lesser, strict=True)
    ]
    per_address["abusive_addresses"] = (per_address["verdict"] == "ban").astype("int64")
    return per_address.assign(kind="address").astype({"people": "int64", "connections": "int64"})


def _points(evidence: pd.DataFrame, shared: pd.Index[Any], rules: AbuseRules) -> pd.DataFrame:
    """Return per address: points, those of harm (kinds that can ban) and proof, ends without reading, and evidence."""
    weights, harm = rules.weights, _kinds(evidence, rules.weights)
    # Many connections of an address that are cut in one minute share a line that broke: they count once.
    together = evidence.groupby(["address", "kind", "minute"])["amount"].transform("sum")
    at_once = together.where(evidence["kind"] == DEAF, 1)
    micro = (evidence["amount"] / at_once * rules.decay_factor(evidence["last_us"]) * MICRO).astype("int64")
    kinds = micro.groupby([evidence["address"], evidence["kind"]]).sum().rename("micro").reset_index()
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
    kinds_of: dict[str, dict[str, float]] = {address: {} for address in sums.index}
    for address, kind, count in zip(kinds["address"], kinds["kind"], kinds["micro"], strict=True):
        kinds_of[address][kind] = round(count / MICRO, 3)
    return sums.assign(evidence=[json.dumps(amounts, separators=(",", ":")) for amounts in kinds_of.values()])


def _standing(evidence: pd.DataFrame, rules: AbuseRules, servers: pd.DataFrame) -> pd.DataFrame:
    """Return the people and the standing of each address: connections that behave, and for how long.

    A connection counts with the time for which it played or published, if it did nothing that bans and was not cut. One
    that is open counts up to the end of the data, and as one who is there now if it has played for `Weights.settled_s`.
    One whose server went away, so that its end was not recorded, counts up to when it ended as far as that is known
    (`ended_us`). Connections that wait for a show are people too, from `_LEAST_WAITING` at once on; that they waited is
    no standing.
    """
    weights, seen_us = rules.weights, min(rules.seen_us, rules.now_us)
    single = evidence[evidence["node"].notna()]
    single = single.assign(begun_us=_epoch_us(single["begun"]))
    one = single.groupby(["node", "conn_id", "address"], as_index=False).agg(
        **{name: (name, "max") for name in ("opened", "good_ms", "begun_us", "last_us", "harmful", "waits")}
    )
    ended, known, last_us = one["opened"] > 0, one["begun_us"] > 0, one["last_us"]
    node = servers.reindex(one["node"]).set_index(one.index)
    restarted = last_us < node["began"]
    until_us = ended_us(last_us, node["heard"], node["began"].where(restarted, inf))
    gone = restarted | (until_us < node["heard"] - _LATE_S * 1e6) | (last_us < seen_us - _CLOCKS_S * 1e6)
    until_us = last_us.where(ended, until_us.where(gone, seen_us))
    lasted_ms = (until_us - one["begun_us"]) / 1000
    open_ms = lasted_ms.clip(lower=weights.play_s * 1000).where(known, 0)
    ms = one["good_ms"].where(ended, open_ms).where(~one["harmful"], 0)
    one["standing_ms"] = (ms * rules.decay_factor(until_us)).astype("int64")
    one["open"] = known & ~ended
    one["people"] = one["open"] & ~one["harmful"] & ~gone & (lasted_ms >= weights.settled_s * 1000)
    still = (last_us >= seen_us - _RETURN_WITHIN_S * 1e6).where(ended, ~gone)
    one["waiting"] = (one["waits"] > 0) & ~known & ~one["harmful"] & still
    sums = one.groupby("address")[["people", "waiting", "open", "standing_ms"]].sum()
    waiting = sums.pop("waiting")
    sums["people"] += waiting.where(waiting >= _LEAST_WAITING, 0)
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
        score=("score", "max"),  # a ban is as long as that of the worst address, however many there are
        first_seen=("first_seen", "min"),
        last_seen=("last_seen", "max"),
    )
    sums = sums[(sums["abusive_addresses"] > 0) | (sums["allowed"] > 0)].reset_index(drop=True)
    share = sums["abusive_addresses"] / sums["addresses"]
    enough = (sums["abusive_addresses"] >= weights.subnet_addresses) & (share >= weights.subnet_share)
    unused = (sums["people"] == 0) & (sums["standing_hours"] == 0) & (sums["allowed"] == 0)
    spared = [rules.spares(ipaddress.ip_network(subnet)) for subnet in sums["subnet"]]
    whole = enough & unused & ~np.array(spared, bool)
    counts = zip(sums["addresses"], sums["abusive_addresses"], strict=True)
    abusive = each[each["verdict"] == "ban"].groupby("subnet")["cidr"].agg(list)
    return sums.assign(
        kind="subnet",
        address=sums["subnet"],
        cidr=[
            _narrowest(abusive[subnet]) if ban and ":" in subnet else subnet
            for subnet, ban in zip(sums["subnet"], whole, strict=True)
        ],
        evidence=[f'{{"addresses":{all_},"abusive_addresses":{abusive}}}' for all_, abusive in counts],
        verdict=np.select([whole, sums["allowed"] > 0], ["ban", "allowed"], "ok"),
    )


def _narrowest(units: Sequence[str]) -> str:
    """Return the smallest network that holds all of these /64s."""
    begins = [int(ipaddress.ip_network(unit).network_address) for unit in units]
    bits = (min(begins) ^ max(begins)).bit_length()
    return str(ipaddress.IPv6Network((min(begins) >> bits << bits, 128 - max(bits, 64))))


def attackers(
    parts: Parts, who: Collection[str], seen_us: int, weights: Weights | None = None
) -> tuple[set[tuple[str, int]], set[str]]:
    """Return the attackers, as connections and as addresses: what limits do to them is no reason for other limits."""
    rules = AbuseRules(weights=weights or Weights(), seen_us=seen_us, now_us=seen_us, since_us=begin_us(parts))
    if parts.small:
        found = parts.pandas(EVIDENCE.name)
        known = nodes(found, parts)
    else:
        asked = parts.spark.createDataFrame([(address,) for address in who], "address string")
        table = parts.table(EVIDENCE.name)
        text = "SELECT /*+ BROADCAST(asked) */ * FROM evidence LEFT SEMI JOIN asked USING (address)"
        known, found = nodes(table, parts), run_text(text, {"evidence": table, "asked": asked}).toArrow().to_pandas()
    found = found[found["address"].isin(who)]
    harm = [kind for kind in _kinds(found, rules.weights) if kind not in SLOW]
    direct = found[found["kind"].isin(harm) & found["node"].notna()]
    judged = address_scores(found, rules, known)
    return set(zip(direct["node"], direct["conn_id"], strict=True)), set(judged["address"][judged["verdict"] == "ban"])


def _kinds(evidence: pd.DataFrame, weights: Weights) -> list[str]:
    """Return the kinds of evidence that can lead to a ban; other evidence leads to a limit at most."""
    return [kind for kind in evidence["kind"].dropna().unique() if weights.bans(kind)]


def _unit_and_subnet(address: str) -> tuple[Network | None, str | None]:
    """Return what a ban of an address would name, and its subnet; (None, None) for a text that is not an address.

    The first is None for an address that no peer has, or that all peers of a translator share.
    """
    try:
        unit = ipaddress.ip_network(address)
    except ValueError:
        return None, None
    length, single = NETWORK_BITS[unit.version], unit.version == 4 and "/" not in address
    if single or (unit.prefixlen == 64 and address.endswith("::/64")):
        first = unit.network_address
        no_peer = first.is_unspecified or first.is_multicast or first == _BROADCAST or first in _LOCAL_NAT64
        return None if no_peer else unit, str(unit.supernet(new_prefix=length))
    return None, address if unit.prefixlen == length else None


def _epoch_us(moments: pd.Series[Any]) -> pd.Series[int]:
    """Return times in microseconds since the epoch; a missing time becomes a number far below 0."""
    return pd.Series(moments.to_numpy("datetime64[us]").astype("int64"), moments.index)
