//! The size of the store. etcd has a database at each of its members. Source: `apiserver/pkg/storage/etcd3/metrics`.

use coracle_store::{MemberSize, Store};
use prometheus::{core::Collector, proto::MetricFamily};

use super::gauge;

/// The size of the embedded store, or the sizes of etcd's databases.
pub(super) fn families(store: &dyn Store, members: &[MemberSize]) -> Vec<MetricFamily> {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let size = gauge(
        "apiserver_storage_size_bytes",
        "Size of the storage database file physically allocated in bytes.",
        &["storage_cluster_id"],
    );
    if let Some(bytes) = store.size() {
        size.with_label_values(&["embedded-0"]).set(signed(bytes));
    }
    // As upstream, this is the size at one of the members.
    if let Some(bytes) = members.iter().find_map(|member| member.bytes) {
        size.with_label_values(&["etcd-0"]).set(signed(bytes));
    }
    let total = gauge(
        "apiserver_storage_db_total_size_in_bytes",
        "Total size of the storage database file physically allocated in bytes.",
        &["endpoint"],
    );
    for member in members {
        // As upstream, -1 means that the member did not respond.
        total.with_label_values(&[member.endpoint.as_str()]).set(member.bytes.map_or(-1, signed));
    }
    [size, total].iter().flat_map(Collector::collect).collect()
}
