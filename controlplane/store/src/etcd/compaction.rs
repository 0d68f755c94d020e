//! Compaction of etcd's history. At each interval, each server tries to increment a counter. Only one server succeeds,
//! and this server compacts the history. Source of the protocol: `compact.go` of `apiserver/pkg/storage/etcd3`.

use std::{sync::Arc, time::Duration};

use super::{
    Shared,
    api::{
        Compare, KeyValue, PutRequest, RangeRequest, TxnRequest,
        compare::{CompareTarget, TargetUnion},
        request_op::Request,
        response_op::Response,
    },
    revision_of,
    transaction::operation,
};
use crate::Error;

/// The key of the counter. The counter is the version of the key in etcd. The key has no `/`, so no object has this
/// key.
const COUNTER: &str = "compaction";

/// The counter, and the newest revision at the time of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CompactionState {
    counter: i64,
    revision: u64,
}

/// At each interval, compacts the history that existed at the interval before.
pub(super) async fn run(shared: Arc<Shared>, interval: Duration) {
    let mut state = CompactionState::default();
    loop {
        tokio::time::sleep(interval).await;
        match shared.compact_once(state).await {
            Ok(next) => state = next,
            Err(error) => tracing::warn!(%error, "cannot compact the history of etcd"),
        }
    }
}

// === impl Shared ===

impl Shared {
    /// Increments the counter and compacts up to the revision of the previous compaction, unless another server was
    /// first. Does not write if there was no commit after the previous compaction.
    pub(super) async fn compact_once(&self, last: CompactionState) -> Result<CompactionState, Error> {
        let newest = self.revision().await?;
        // The increment of the counter is one revision.
        if last.revision > 0 && newest <= last.revision + 1 {
            return Ok(last);
        }
        let key = self.keys.outer(COUNTER);
        let compare = Compare {
            target: CompareTarget::Version.into(),
            key: key.clone(),
            target_union: Some(TargetUnion::Version(last.counter)),
            ..Compare::default()
        };
        let value = newest.to_string().into_bytes();
        let put = Request::RequestPut(PutRequest { key: key.clone(), value, lease: 0 });
        let read_counter = Request::RequestRange(RangeRequest { key, ..RangeRequest::default() });
        let response = self.connection.txn(TxnRequest {
            compare: vec![compare],
            success: vec![operation(put)],
            failure: vec![operation(read_counter)],
        });
        let response = response.await?;
        let revision = revision_of(response.header.as_ref());
        if !response.succeeded {
            let found = response.responses.into_iter().find_map(|one| match one.response {
                Some(Response::ResponseRange(range)) => range.kvs.into_iter().next(),
                _ => None,
            });
            return Ok(CompactionState { counter: found.map_or(0, |kv: KeyValue| kv.version), revision });
        }
        if last.revision > 0 {
            self.compact(last.revision).await?;
        }
        Ok(CompactionState { counter: last.counter + 1, revision })
    }
}
