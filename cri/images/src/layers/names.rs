//! Limits the memory for the names in the metadata of layers. The names are in memory as long as the layers are in the
//! store.
//!
//! A layer's archive determines their number: a path of 4 KiB implies two thousand directories with 4 MiB of names.
//! Nearly all layers have few names. Such layers do not count. All other layers share a limit, so that images do not
//! fill the memory of the process.

use super::{LayerState, Meta};

/// Maximum bytes of the names of a layer that does not count for [`TOTAL`].
const UNCOUNTED_MAX: usize = 16 << 10;
/// Maximum bytes of the names of all other layers together.
pub(super) const TOTAL: usize = 64 << 20;
/// Estimated bytes of a name besides its text.
const PER_NAME: usize = 48;

/// Whether a layer with this many bytes of names fits beside the other layers.
pub(super) fn fit<'a>(own: usize, others: impl Iterator<Item = &'a LayerState>) -> bool {
    own == 0 || others.map(of_state).fold(own, usize::saturating_add) <= TOTAL
}

/// Estimated bytes of the names of a layer. 0 for few names.
pub(super) fn of(meta: &Meta) -> usize {
    let links = meta.links.iter().flat_map(|link| [link.path.len(), link.target.len()]);
    let bytes: usize = meta.implied.iter().map(String::len).chain(links).map(|text| text + PER_NAME).sum();
    if bytes > UNCOUNTED_MAX { bytes } else { 0 }
}

fn of_state(state: &LayerState) -> usize {
    match state {
        LayerState::Complete { meta, .. } => of(meta),
        LayerState::Unpacking(all) => all.names(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    fn meta(implied: Vec<String>) -> Meta {
        Meta { diff_id: Digest::of(b"a"), bytes: 1, inodes: 1, implied, links: Vec::new() }
    }

    #[test]
    fn layers_with_many_names_share_a_limit() {
        assert_eq!(of(&meta(vec!["usr/lib".to_owned(); 200])), 0, "an ordinary layer");
        let large = meta(vec!["d".repeat(1 << 10); 1 << 10]);
        let own = of(&large);
        assert!(own > 1 << 20);
        let state = |meta| LayerState::Complete { meta, refs: 1, keep_until: None };
        let others: Vec<LayerState> = (0..TOTAL / own - 1).map(|_| state(large.clone())).collect();
        assert!(fit(own, others.iter()));
        assert!(!fit(own, others.iter().chain([&state(large.clone())])));
        assert!(fit(0, others.iter().chain([&state(large)])), "an ordinary layer");
    }
}
