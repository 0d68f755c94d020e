//! Subordinate ids of local users: `/etc/subuid` and `/etc/subgid`.
//!
//! A user may map its subordinate ids into a user namespace (newuidmap(1)). It could then send signals to processes of a
//! pod with these ids, and access files with them. So a pod gets no block that contains such an id. The ids of the user
//! `kubelet` are for pods.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use super::BLOCK;

/// The files, in the format of subuid(5).
pub(super) const FILES: [&str; 2] = ["/etc/subuid", "/etc/subgid"];
/// Maximum bytes of a file.
const FILE_MAX: u64 = 1 << 20;
/// The user whose subordinate ids the upstream kubelet gives to pods.
const KUBELET: &str = "kubelet";

/// The first ids of the blocks with subordinate ids of local users. A file that does not exist has none.
pub(super) fn blocks(path: &Path) -> io::Result<HashSet<u32>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HashSet::new()),
        file => file?,
    };
    let mut bytes = Vec::new();
    if file.take(FILE_MAX + 1).read_to_end(&mut bytes)? as u64 > FILE_MAX {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is larger than {FILE_MAX} bytes")));
    }
    Ok(String::from_utf8_lossy(&bytes).lines().filter_map(range).flat_map(first_ids).collect())
}

/// The first and the last id of a line `user:first:count`. None if the line has no id, or no valid numbers.
fn range(line: &str) -> Option<(u32, u32)> {
    let mut fields = line.split(':');
    let (user, first, count) = (fields.next()?, fields.next()?, fields.next()?);
    let (first, count): (u32, u32) = (first.trim().parse().ok()?, count.trim().parse().ok()?);
    let last = first.saturating_add(count.checked_sub(1)?);
    (user.trim() != KUBELET).then_some((first, last))
}

/// The first ids of the blocks that contain the ids from `first` to `last`.
fn first_ids((first, last): (u32, u32)) -> impl Iterator<Item = u32> {
    (first / BLOCK..=last / BLOCK).map(|block| block * BLOCK)
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
