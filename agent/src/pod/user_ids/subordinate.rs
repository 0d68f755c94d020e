//! Subordinate ids of local users: `/etc/subuid` and `/etc/subgid`.
//!
//! A user may map its subordinate ids into a user namespace (newuidmap(1)). The user could then send signals to
//! processes of a pod with these ids, and access files of these ids. So a pod gets no block that contains such an id.
//! The ids of the user `kubelet` are for pods.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::RangeInclusive;
use std::path::Path;

use super::BLOCK;

/// The files, in the format of subuid(5).
pub(super) const FILES: [&str; 2] = ["/etc/subuid", "/etc/subgid"];
/// Maximum bytes of a file.
const FILE_MAX: u64 = 1 << 20;
/// The user whose subordinate ids the upstream kubelet gives to pods.
const KUBELET: &str = "kubelet";

/// The first ids of the blocks with subordinate ids of local users. A file that does not exist has no such ids.
pub(super) fn blocks(path: &Path) -> io::Result<HashSet<u32>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HashSet::new()),
        file => file?,
    };
    let mut bytes = Vec::new();
    if file.take(FILE_MAX + 1).read_to_end(&mut bytes)? as u64 > FILE_MAX {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is larger than {FILE_MAX} bytes")));
    }
    let merged = merged(String::from_utf8_lossy(&bytes).lines().filter_map(range).collect());
    Ok(merged.into_iter().flatten().map(|block| block * BLOCK).collect())
}

/// The numbers of the blocks with the ids of a line `user:first:count`. None if the line has no id, or no valid
/// numbers. A count beyond the last id is valid: newuidmap(1) accepts it.
fn range(line: &str) -> Option<RangeInclusive<u32>> {
    let mut fields = line.split(':');
    let (user, first, count) = (fields.next()?, fields.next()?, fields.next()?);
    let (first, count): (u32, u64) = (first.trim().parse().ok()?, count.trim().parse().ok()?);
    let last = u64::from(first).saturating_add(count.checked_sub(1)?);
    let last = u32::try_from(last).unwrap_or(u32::MAX);
    (user.trim() != KUBELET).then_some(first / BLOCK..=last / BLOCK)
}

/// The same blocks in ranges that do not overlap. Otherwise many lines with all ids would make 65,536 blocks each.
fn merged(mut ranges: Vec<RangeInclusive<u32>>) -> Vec<RangeInclusive<u32>> {
    ranges.sort_unstable_by_key(|range| *range.start());
    let mut next = 0;
    let mut merged = Vec::new();
    for range in ranges {
        let first = next.max(*range.start());
        if first <= *range.end() {
            next = *range.end() + 1;
            merged.push(first..=*range.end());
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks_of(text: &str) -> Vec<u32> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subuid");
        std::fs::write(&path, text).unwrap();
        let mut blocks: Vec<u32> = blocks(&path).unwrap().into_iter().map(|first| first / BLOCK).collect();
        blocks.sort_unstable();
        blocks
    }

    #[test]
    fn a_block_belongs_to_a_user_who_has_one_of_its_ids() {
        assert_eq!(blocks_of("alice:100000:65536\n"), [1, 2]);
        assert_eq!(blocks_of("1000:131072:1\nbob:262144:65536"), [2, 4]);
        assert_eq!(blocks_of("kubelet:65536:7208960\n"), [0; 0]);
        assert_eq!(blocks_of("eve:4294901760:4294967295\n"), [65_535]);
    }

    #[test]
    fn a_count_beyond_the_last_id_includes_all_later_ids() {
        for count in ["4294967296", "18446744073709551615"] {
            assert_eq!(blocks_of(&format!("eve:4294836224:{count}\n")), [65_534, 65_535], "{count}");
        }
    }

    #[test]
    fn each_block_is_in_one_range_whatever_the_number_of_lines() {
        assert_eq!(merged(vec![RangeInclusive::new(0, 65_535); 50_000]).len(), 1);
        assert_eq!(merged(vec![7..=9, 1..=4, 2..=3, 4..=5, 9..=9]), [1..=4, 5..=5, 7..=9]);
        assert_eq!(blocks_of("alice:65536:131072\nbob:131072:65536\n"), [1, 2]);
    }

    #[test]
    fn invalid_lines_and_absent_files_have_no_ids() {
        assert_eq!(blocks_of("\n# a comment\nalice:100000\nbob:x:1\ncarol:65536:0\ndave:-1:2\n"), [0; 0]);
        assert!(blocks(Path::new("/nonexistent/subuid")).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_too_large_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subuid");
        std::fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        assert!(blocks(&path).is_ok());
        std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
        assert_eq!(blocks(&path).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }
}
