//! The order of messages about fields: the order of the document. The parsed tree does not keep this order.

use std::collections::HashMap;

/// Hash of a path such as `spec.containers[0].name` (FNV-1a over its text). The hash extends the hash of the parent. So
/// the cost of a key depends only on its own length, not on the length of its path.
#[derive(Clone, Copy)]
pub(super) struct PathHash(u64);

impl Default for PathHash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

// === impl PathHash ===

impl PathHash {
    pub(super) fn field(self, name: &str) -> Self {
        let root = self.0 == Self::default().0;
        let parent = if root { self } else { self.then(b".") };
        parent.then(name.as_bytes())
    }

    pub(super) fn item(self, index: usize) -> Self {
        self.then(format!("[{index}]").as_bytes())
    }

    pub(super) fn value(self) -> u64 {
        self.0
    }

    fn then(self, bytes: &[u8]) -> Self {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        Self(bytes.iter().fold(self.0, step))
    }
}

/// Sorts messages such as `unknown field "path"` by the position of the path in the document. For a duplicate field,
/// its second position counts. A hash collision only changes the order.
pub(super) fn by_document(notes: &mut [String], keys: &[u64]) {
    if notes.len() < 2 || keys.is_empty() {
        return;
    }
    let mut places: HashMap<u64, Vec<usize>> = HashMap::new();
    let path = |note: &str| note.split('"').nth(1).map(|path| PathHash::default().then(path.as_bytes()).0);
    for hash in notes.iter().filter_map(|note| path(note)) {
        places.insert(hash, Vec::new());
    }
    for (place, hash) in keys.iter().enumerate() {
        if let Some(found) = places.get_mut(hash) {
            found.push(place);
        }
    }
    notes.sort_by_cached_key(|note| {
        let nth = usize::from(note.starts_with("duplicate"));
        let found = path(note).and_then(|hash| places.get(&hash));
        found.and_then(|found| found.get(nth).or(found.first())).copied().unwrap_or(usize::MAX)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_follow_the_document() {
        let parsed = super::super::parse_json(br#"{"z": [{"u": 1}], "b": 1, "a": 1, "b": 2}"#).unwrap();
        let mut notes =
            ["duplicate field \"b\"", "unknown field \"a\"", "unknown field \"z[0].u\""].map(str::to_owned);
        by_document(&mut notes, &parsed.keys);
        assert_eq!(notes, ["unknown field \"z[0].u\"", "unknown field \"a\"", "duplicate field \"b\""]);
    }
}
