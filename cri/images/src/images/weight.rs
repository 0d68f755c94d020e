//! Limits the memory for the configurations of images. They are in memory as long as their images are in the store.
//!
//! A registry determines the size of a configuration. Nearly all configurations are small and do not count. The large
//! configurations share a limit, so that many images do not fill the memory of the process. An owner, for example a
//! namespace, must leave at least as much of the limit free as it uses, so no owner can use up the limit. An image
//! counts for the owner that pulled it first.

use std::collections::HashMap;

use oci_spec::image::ImageConfiguration;

use super::{Images, StoreError};
use crate::digest::Digest;
use crate::manifest::ParsedConfig;
use crate::table::{Entry, Table};

/// Maximum bytes of a configuration that does not count.
const SMALL: usize = 128 << 10;
/// Maximum bytes of all configurations that count.
const LARGE_TOTAL: usize = 64 << 20;
/// Estimated bytes of a parsed value besides its text, and of an entry of the history.
const PER_VALUE: usize = 64;
const PER_HISTORY_ENTRY: usize = 256;

// === impl Images ===

impl Images {
    /// Checks whether the store accepts an image with this configuration. Call it before the layers are fetched;
    /// [`Images::put`] checks again.
    pub(crate) fn may_put(
        &self,
        id: &Digest,
        owner: &str,
        document: &str,
        parsed: &ParsedConfig,
    ) -> Result<(), StoreError> {
        check(&self.table(), id, owner, document, parsed)
    }
}

/// Checks whether the table accepts an image with this configuration. An image that is in the table counts already.
pub(super) fn check(
    table: &Table,
    id: &Digest,
    owner: &str,
    document: &str,
    parsed: &ParsedConfig,
) -> Result<(), StoreError> {
    let has_room = table.entry(id).is_some() || fits(table, owner, counted_bytes(document, &parsed.config));
    if has_room { Ok(()) } else { Err(StoreError::Configurations) }
}

fn fits(table: &Table, owner: &str, bytes: usize) -> bool {
    let of_entry = |entry: &Entry| {
        (entry.record.owner == owner, counted_bytes(&entry.record.config, &entry.image.config))
    };
    bytes == 0 || is_within(table.all().map(of_entry), bytes, !owner.is_empty())
}

/// Whether a configuration of `bytes` fits beside the other configurations. `others` yields for each other
/// configuration whether it has the same owner, and its bytes. If `has_owner` is false, only the sum has a limit.
fn is_within(others: impl Iterator<Item = (bool, usize)>, bytes: usize, has_owner: bool) -> bool {
    let (mut all, mut of_owner) = (bytes, bytes);
    for (is_own, other) in others {
        all = all.saturating_add(other);
        of_owner = of_owner.saturating_add(if is_own { other } else { 0 });
    }
    LARGE_TOTAL.checked_sub(all).is_some_and(|free| !has_owner || of_owner <= free)
}

/// Estimated bytes of a configuration: the document and its parsed form. 0 for a small configuration.
fn counted_bytes(document: &str, config: &ImageConfiguration) -> usize {
    let length = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len);
    let values = config.config().as_ref().map_or(0, |process| {
        let lists =
            [process.env(), process.cmd(), process.entrypoint(), process.exposed_ports(), process.volumes()];
        let labels = process.labels().as_ref().map_or(0, HashMap::len);
        labels + lists.into_iter().map(length).sum::<usize>()
    });
    let history = config.history().as_ref().map_or(0, Vec::len);
    let bytes = 2 * document.len() + PER_VALUE * values + PER_HISTORY_ENTRY * history;
    if bytes > SMALL { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_configuration_above_the_limit_is_rejected_and_not_reported_as_a_full_disk() {
        assert_eq!(StoreError::Configurations.kind(), ErrorKind::Rejected);
    }

    fn weight(more: serde_json::Value) -> usize {
        let mut config =
            json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let document = config.to_string();
        let parsed: ImageConfiguration = serde_json::from_value(config).unwrap();
        counted_bytes(&document, &parsed)
    }

    #[test]
    fn ordinary_configurations_do_not_count() {
        let env = vec!["A=b"; 100];
        let history = vec![json!({"created_by": "RUN make"}); 127];
        assert_eq!(weight(json!({"config": {"Env": env}, "history": history})), 0);
        for large in [
            json!({"config": {"Env": vec![""; 10_000]}}),
            json!({"history": vec![json!({}); 1000]}),
            json!({"config": {"Labels": {"a": "x".repeat(1 << 20)}}}),
        ] {
            assert!(weight(large) > SMALL);
        }
    }

    #[test]
    fn large_configurations_share_a_limit() {
        assert!(fits(&Table::default(), "a", 0), "a small configuration");
        let of_node =
            |others: &[usize]| is_within(others.iter().map(|one| (true, *one)), LARGE_TOTAL / 2, false);
        assert!(of_node(&[LARGE_TOTAL / 2]) && !of_node(&[LARGE_TOTAL / 2, 1]));
    }

    #[test]
    fn an_owner_must_leave_as_much_free_as_it_uses() {
        let (own, other) = (|bytes: usize| (true, bytes), |bytes: usize| (false, bytes));
        let fits = |others: &[(bool, usize)], bytes| is_within(others.iter().copied(), bytes, true);
        let half = LARGE_TOTAL / 2;
        assert!(fits(&[], half) && fits(&[own(half - 1)], 1) && !fits(&[own(half)], 1));
        assert!(fits(&[other(half)], half / 2) && !fits(&[other(half)], half / 2 + 1));
        assert!(fits(&[other(half), other(half / 2)], half / 4));
    }
}
