//! Tests of valid and invalid headers. Their effects on disk are tested in `unpack`.

use super::{Archive, ArchiveError, Entry, Kind};
use crate::fixture::TestTar;

fn entries(bytes: &[u8]) -> Result<Vec<Entry>, ArchiveError> {
    let mut archive = Archive::new(bytes);
    let mut entries = Vec::new();
    while let Some(entry) = archive.next_entry()? {
        entries.push(entry);
    }
    Ok(entries)
}

#[test]
fn data_is_skipped_and_end_blocks_may_be_missing() {
    let tar = TestTar::new().file("a", &[7; 1000]).file("b", b"").directory("c").finish();
    for end in [tar.len(), tar.len() - 512, tar.len() - 1024] {
        let kinds: Vec<Kind> = entries(&tar[..end]).unwrap().into_iter().map(|e| e.kind).collect();
        let file = |size| Kind::File { size, sparse: None };
        assert_eq!(kinds, [file(1000), file(0), Kind::Directory]);
    }
}

#[test]
fn wrong_checksums_and_torn_headers_are_refused() {
    let mut tar = TestTar::new().file("a", b"x").finish();
    assert!(matches!(entries(&tar[..100]), Err(ArchiveError::Damaged(_))));
    tar[3] ^= 1;
    assert!(matches!(entries(&tar), Err(ArchiveError::Damaged(_))));
}

#[test]
fn the_size_of_an_extended_header_counts() {
    let tar = TestTar::new()
        .pax(&[("size", b"3")])
        .raw(b'0', "a", "", &crate::fixture::attributes(0, 0, 0, 0), b"abc", 0)
        .file("b", b"")
        .finish();
    assert_eq!(entries(&tar).unwrap().len(), 2);
}

#[test]
fn an_extended_header_above_its_limit_is_refused() {
    let long = vec![b'x'; (1 << 20) + 1];
    for kind in [b'x', b'X', b'L', b'K'] {
        let none = crate::fixture::attributes(0, 0, 0, 0);
        let tar = TestTar::new().raw(kind, "a", "", &none, &long, long.len() as u64).file("b", b"").finish();
        let refused = entries(&tar);
        let is_refused = matches!(refused, Err(ArchiveError::Damaged("an extended header of over 1 MiB")));
        assert!(is_refused, "{}: {refused:?}", char::from(kind));
    }
}

/// CVE-2025-58183: the number of segments of a sparse file had no limit.
#[test]
fn cve_2025_58183_a_sparse_map_without_end_is_refused() {
    let sparse = |count: usize| {
        let map = format!("{count}\n{}", "0\n0\n".repeat(count.min(1 << 16)));
        let keys: [(&str, &[u8]); 4] = [
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"a"),
            ("GNU.sparse.realsize", b"0"),
        ];
        entries(&TestTar::new().pax(&keys).file("a", map.as_bytes()).finish())
    };
    for count in [(1 << 16) + 1, usize::MAX] {
        assert!(matches!(sparse(count), Err(ArchiveError::Damaged("too many sparse segments"))), "{count}");
    }
    assert!(!matches!(sparse(1 << 16), Err(ArchiveError::Damaged("too many sparse segments"))));
}
