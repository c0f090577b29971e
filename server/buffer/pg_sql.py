"""The statements of the PostgreSQL buffer. Each runs in the run's schema (see `pg_schema`), inside a transaction of the caller's.

All times are Unix seconds of the service's clock, never the database's: one clock decides when a lease ran out.
"""

from __future__ import annotations

from typing import Any

from palestra.server.buffer.lineage import ABANDONED, Versions
from palestra.server.buffer.pg_link import Db

FREE = "owner = null, claim_id = null, lease_until = null"
CLAIMABLE = "ended_at is null and (state = 'ready' or lease_until <= %(now)s)"
AMONG = "group_id = any(%(ids)s::text[])"

PUT = f"""
    with lost as (
        select exists (select from publishes where abandoned and version = any(%(versions)s::bigint[])) as is_so),
    fresh as (
        insert into groups (group_id, task_id, group_size, state, reason, versions, put_at, ended_at)
        select %(group_id)s::text, %(task_id)s::text, %(group_size)s::int, case when is_so then 'dropped' else 'ready' end,
            case when is_so then '{ABANDONED}' end, %(versions)s::bigint[], %(now)s::double precision,
            case when is_so then %(now)s::double precision end
        from lost on conflict (group_id) do nothing returning seq, state),
    stored as (insert into arrays (seq, data) select seq, %(data)b::bytea from fresh where state = 'ready'),
    counted as (insert into counts (seq, rollouts) select seq, %(counts)b::bytea from fresh)
    select count(*) from fresh"""
PUT_DROPPED = """
    with fresh as (
        insert into groups (group_id, task_id, group_size, state, reason, versions, put_at, ended_at)
        values (%(group_id)s, %(task_id)s, %(group_size)s, 'dropped', %(reason)s, %(versions)s::bigint[], %(now)s, %(now)s)
        on conflict (group_id) do nothing returning seq),
    counted as (insert into counts (seq, rollouts) select seq, %(counts)b::bytea from fresh)
    select count(*) from fresh"""
# A row that somebody else holds (an administrator's open transaction) is passed over, not waited for.
CLAIM = f"""
    with free as (select seq from groups where {CLAIMABLE} order by seq limit %(n)s::bigint for update skip locked),
    held as (
        update groups set state = 'claimed', owner = %(owner)s, claim_id = %(claim_id)s, lease_until = %(until)s
        where seq = any(array(select seq from free)) returning seq, group_id)
    select group_id, data from held left join arrays using (seq) order by seq"""
RECLAIM = """
    with held as (
        update groups set lease_until = %(until)s
        where ended_at is null and state = 'claimed' and owner = %(owner)s and claim_id = %(claim_id)s returning seq, group_id)
    select group_id, data from held left join arrays using (seq) order by seq"""
RENEW = f"update groups set lease_until = %(until)s where {AMONG} and state = 'claimed' and owner = %(owner)s"
RELEASE = f"update groups set state = 'ready', {FREE} where {AMONG} and state = 'claimed' and owner = %(owner)s"
DROP = f"""
    update groups set state = 'dropped', reason = %(reason)s, ended_at = %(now)s, {FREE}
    where {AMONG} and ended_at is null"""
COMMIT = f"""
    update groups set state = 'committed', step = %(step)s, checkpoint_id = %(checkpoint_id)s, ended_at = %(now)s, lease_until = null
    where {AMONG} and state = 'claimed' and owner = %(owner)s returning group_id"""
COMMITTED_BEFORE = f"""
    select group_id from groups
    where {AMONG} and state = 'committed' and owner = %(owner)s and step = %(step)s"""
RECOUNT = """
    update counts set rollouts = %(counts)b
    where seq = (select seq from groups where group_id = %(group_id)s and state <> 'committed')"""
READY_COUNT = f"select count(*) from groups where {CLAIMABLE}"
COUNTS = """
    select case when state = 'claimed' and lease_until <= %(now)s then 'ready' else state end as now, reason, count(*)
    from groups group by now, reason order by now, reason"""
DEPTHS = """
    select case when lease_until > %(now)s then 'claimed' else 'ready' end as now, count(*), max(%(now)s - put_at), avg(%(now)s - put_at)
    from groups where ended_at is null group by now"""
DROPPED = "select group_id from groups where reason = %(reason)s order by seq"

WAITING = f"select seq, group_id, versions from groups where {CLAIMABLE} order by seq"
UNDONE_BY_RESTORE = """
    select seq, group_id, versions, state, exists (select from arrays a where a.seq = g.seq) from groups g
    where ended_at is null or (state = 'committed' and step > %(step)s) order by seq"""
DROP_ROWS = f"""
    update groups set state = 'dropped', reason = %(reason)s, ended_at = %(now)s, step = null, checkpoint_id = null, {FREE}
    where seq = any(%(rows)s::bigint[])"""
READY_ROWS = f"""
    update groups set state = 'ready', {FREE}, step = null, checkpoint_id = null, ended_at = null, free_at = null
    where seq = any(%(rows)s::bigint[])"""
ABANDON = "update publishes set abandoned = true where version > %(version)s and train_step > %(step)s"
PUBLISH = "insert into publishes (version, train_step, at) values (%(version)s, %(step)s, %(now)s)"
HIGHEST = "select coalesce(max(version), -1) from publishes"
STEP_OF = "select train_step from publishes where version <= %(version)s order by version desc limit 1"

MARK_FREE = """
    update groups g set free_at = %(now)s
    where free_at is null and (state = 'dropped' or (state = 'committed' and step <= %(step)s))
        and exists (select from arrays a where a.seq = g.seq)"""
SHELVES = "select group_id, octet_length(data), free_at from arrays join groups using (seq) order by seq"
CLEAR = f"delete from arrays where seq in (select seq from groups where {AMONG})"

NOTE_CALL = "update last_call set token = %s"
LAST_CALL = "select token from last_call"

ENTRIES = """
    select group_id, task_id, group_size, state, reason, step, checkpoint_id, owner, versions, rollouts, put_at, ended_at,
        octet_length(data), free_at
    from groups join counts using (seq) left join arrays using (seq) order by seq"""
GROUP = "select data from groups left join arrays using (seq) where group_id = %(id)s"
PUBLISHES = "select version, train_step, abandoned from publishes order by version"


def read_versions(db: Db) -> Versions:
    """What was published, as it stands."""
    return Versions(db.execute(PUBLISHES.encode(), binary=True).fetchall())


def number(db: Db, query: str, values: dict[str, Any] | None = None) -> int:
    """The one number that a query gives."""
    row = db.execute(query.encode(), values).fetchone()
    return int(row[0]) if row else 0
