//! The etcd transaction of a write, and its outcome. No I/O.

use super::{
    Keys,
    api::{
        Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
        compare::{CompareTarget, TargetUnion},
        request_op::Request,
        response_op::Response,
    },
    revision_of, signed, unsigned,
};
use crate::{Expect, Write};

/// The outcome of a transaction.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Committed(u64),
    Conflict { found: Option<u64>, at: u64 },
    Guard { at: u64 },
}

/// The transaction of a write. The object is written first, so that its event precedes the event of the guard.
pub(super) fn request(keys: &Keys, write: &Write, value: Option<Vec<u8>>, lease: i64) -> TxnRequest {
    let name = keys.outer(&write.key);
    let mut compare = vec![equal(name.clone(), write.expect)];
    let change = match value {
        Some(value) => Request::RequestPut(PutRequest { key: name.clone(), value, lease }),
        None => Request::RequestDeleteRange(DeleteRangeRequest { key: name.clone() }),
    };
    let mut success = vec![operation(change)];
    if let Some(guard) = &write.guard {
        let name = keys.outer(&guard.key);
        compare.push(equal(name.clone(), guard.expect));
        success.push(operation(Request::RequestPut(PutRequest { key: name, ..PutRequest::default() })));
    }
    let read_revision = RangeRequest { key: name, keys_only: true, ..RangeRequest::default() };
    TxnRequest { compare, success, failure: vec![operation(Request::RequestRange(read_revision))] }
}

/// The outcome of the transaction of a write.
pub(super) fn outcome(write: &Write, response: &TxnResponse) -> Outcome {
    let at = revision_of(response.header.as_ref());
    if response.succeeded {
        return Outcome::Committed(at);
    }
    let found = response.responses.iter().find_map(|one| match &one.response {
        Some(Response::ResponseRange(range)) => range.kvs.first().map(|kv| unsigned(kv.mod_revision)),
        _ => None,
    });
    let holds = match write.expect {
        Expect::Absent => found.is_none(),
        Expect::Revision(expected) => found == Some(expected),
    };
    if holds && write.guard.is_some() { Outcome::Guard { at } } else { Outcome::Conflict { found, at } }
}

/// The condition that an entry has the expected revision. An absent entry has revision 0 in etcd.
fn equal(key: Vec<u8>, expect: Expect) -> Compare {
    let revision = match expect {
        Expect::Absent => 0,
        Expect::Revision(revision) => signed(revision),
    };
    let target = CompareTarget::Mod.into();
    Compare { target, key, target_union: Some(TargetUnion::ModRevision(revision)), ..Compare::default() }
}

pub(super) fn operation(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Guard, Tier, etcd::api};

    fn guarded(expect: Expect) -> Write {
        let guard = Some(Guard { key: "guard".into(), expect: Expect::Revision(7) });
        Write { key: "/a".into(), expect, value: Some("1".into()), tier: Tier::Durable, guard }
    }

    #[test]
    fn object_and_guard_are_one_transaction() {
        let txn = request(&Keys::new("/p/"), &guarded(Expect::Absent), Some(b"1".to_vec()), 0);
        let compared: Vec<_> = txn.compare.iter().map(|one| (&one.key[..], one.target_union)).collect();
        let at = |revision| Some(TargetUnion::ModRevision(revision));
        assert_eq!(compared, [(&b"/p//a"[..], at(0)), (&b"/p/guard"[..], at(7))]);
        assert_eq!(txn.success.len(), 2);
    }

    #[test]
    fn a_failed_comparison_is_attributed_to_object_or_guard() {
        let response = |found: Option<i64>| {
            let kvs = found.map(|mod_revision| api::KeyValue { mod_revision, ..api::KeyValue::default() });
            let range =
                api::RangeResponse { kvs: kvs.into_iter().collect(), ..api::RangeResponse::default() };
            let header = Some(api::ResponseHeader { revision: 9 });
            let responses = vec![api::ResponseOp { response: Some(Response::ResponseRange(range)) }];
            TxnResponse { header, succeeded: false, responses }
        };
        let write = guarded(Expect::Revision(5));
        assert_eq!(outcome(&write, &response(Some(5))), Outcome::Guard { at: 9 });
        assert_eq!(outcome(&write, &response(Some(6))), Outcome::Conflict { found: Some(6), at: 9 });
        assert_eq!(outcome(&write, &response(None)), Outcome::Conflict { found: None, at: 9 });
    }
}
