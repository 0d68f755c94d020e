//! The hash of an OpenAPI document. The hash is computed from the inputs of the document, without a build of the
//! document. Clients read the hashes of all documents, but only few documents.

use std::hash::{Hash, Hasher};
use std::sync::LazyLock;

use sha2::{Digest, Sha512};

use crate::schema::model::packed_documents;

/// Hash of the code that writes documents. Another version of the program may write other documents for the same kinds.
const CODE: u64 = hash_of([
    include_bytes!("../openapi.rs"),
    include_bytes!("list.rs"),
    include_bytes!("operation.rs"),
    include_bytes!("paths.rs"),
    include_bytes!("v2.rs"),
]);

/// Hash of the generated files.
static DATA: LazyLock<String> = LazyLock::new(|| {
    let mut hash = Sha512::new();
    for packed in packed_documents() {
        hash.update(packed);
    }
    hex::encode_upper(hash.finalize())
});

/// A hash under construction. Equal values have equal hashes in all processes of one version of the program on one
/// architecture.
pub(super) struct Fingerprint(Sha512);

/// FNV-1a hash of several texts. The compiler can compute it.
const fn hash_of(texts: [&[u8]; 5]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut number = 0;
    while number < texts.len() {
        let text = texts[number];
        let mut index = 0;
        while index < text.len() {
            hash = (hash ^ text[index] as u64).wrapping_mul(0x0100_0000_01b3);
            index += 1;
        }
        number += 1;
    }
    hash
}

// === impl Fingerprint ===

impl Fingerprint {
    /// Starts with the hash of the code and the hash of the generated files.
    pub(super) fn new() -> Fingerprint {
        let mut hash = Fingerprint(Sha512::new());
        (CODE, DATA.as_str()).hash(&mut hash);
        hash
    }

    /// The hash, in upper-case hexadecimal.
    pub(super) fn text(self) -> String {
        hex::encode_upper(self.0.finalize())
    }
}

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The first eight bytes of the hash.
    fn finish(&self) -> u64 {
        let digest = self.0.clone().finalize();
        digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(values: impl Hash) -> String {
        let mut hash = Fingerprint::new();
        values.hash(&mut hash);
        hash.text()
    }

    #[test]
    fn hashes_differ_if_a_value_differs() {
        assert_eq!(hash(("a", "bc")), hash(("a", "bc")));
        assert_ne!(hash(("a", "bc")), hash(("ab", "c")), "the borders of texts count");
        assert_ne!(hash(serde_json::json!({"a": 1})), hash(serde_json::json!({"a": 1.0})));
        assert_eq!(hash("").len(), 128);
        let (mut one, mut other) = (Fingerprint::new(), Fingerprint::new());
        ("a", "b").hash(&mut one);
        "a".hash(&mut other);
        assert_ne!(one.finish(), other.finish());
        assert_eq!(format!("{:016X}", one.finish()), one.text()[..16]);
    }

    #[test]
    fn other_code_has_another_hash() {
        let texts: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];
        assert_ne!(hash_of(texts), hash_of([b"a", b"b", b"c", b"d", b"f"]));
        assert_ne!(CODE, hash_of(texts));
    }
}
