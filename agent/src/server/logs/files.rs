//! Files of one log: rotated files and the current one, and the start of a tail.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::line::{LINE_MAX, Line};
use crate::bounded;

/// The existing files of the log, the oldest first. The names of rotated files end with a time, so they sort by age.
pub(super) fn all(log: &Path) -> Vec<PathBuf> {
    let name = log.file_name().map(|name| format!("{}.", name.to_string_lossy())).unwrap_or_default();
    let entries = log.parent().and_then(|dir| fs::read_dir(dir).ok()).into_iter().flatten().flatten();
    let is_rotated = |file: &fs::DirEntry| {
        let file = file.file_name().to_string_lossy().into_owned();
        file.strip_prefix(&name)
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()) && !rest.ends_with(".gz"))
    };
    let mut files: Vec<PathBuf> = entries.filter(is_rotated).map(|entry| entry.path()).collect();
    files.sort();
    files.push(log.to_owned());
    files
}

/// The file that follows the file with this inode. If the file with the inode was removed, the oldest file.
pub(super) fn after(log: &Path, inode: u64) -> Option<PathBuf> {
    let files = all(log);
    let at = files.iter().position(|file| fs::metadata(file).is_ok_and(|found| found.ino() == inode));
    files.into_iter().nth(at.map_or(0, |at| at + 1)).filter(|next| next.exists())
}

/// Start of the last `count` lines: index of the file, and offset in it.
///
/// A line in several parts counts as one line, even if its last part is not written yet. The result of a cancelled
/// search is the start of the log.
pub(super) fn tail(
    files: &[PathBuf],
    count: usize,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<(usize, u64)> {
    let mut search = TailSearch { wanted: count, lines: 0, is_open: false, is_cancelled };
    for (index, file) in files.iter().enumerate().rev() {
        match bounded::open(file) {
            Ok(mut file) => {
                if let Some(offset) = search.search_backwards(&mut file)? {
                    return Ok((index, offset));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok((0, 0))
}

/// State of the search for the start of a tail, from the last file to the first.
struct TailSearch<'a> {
    /// Lines of the tail.
    wanted: usize,
    /// Lines that begin at or after the position that was reached.
    lines: usize,
    /// Whether the line at the position is already counted.
    is_open: bool,
    is_cancelled: &'a dyn Fn() -> bool,
}

impl TailSearch<'_> {
    /// Searches backwards for the end of the line before the wanted lines. Returns its offset. `None` if the search is
    /// cancelled, or if the file has no such line.
    fn search_backwards(&mut self, file: &mut File) -> io::Result<Option<u64>> {
        const BLOCK: u64 = 64 * 1024;
        let mut end = file.seek(SeekFrom::End(0))?;
        let mut carry: Vec<u8> = Vec::new();
        while end > 0 {
            if (self.is_cancelled)() {
                return Ok(None);
            }
            let start = end.saturating_sub(BLOCK);
            let mut block = vec![0; usize::try_from(end - start).unwrap_or(0)];
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(&mut block)?;
            block.append(&mut carry);
            // The line before the first newline of the block may be incomplete, unless the block is at the start of the
            // file.
            let mut until = block.len();
            while let Some(newline) = block[..until.saturating_sub(1)].iter().rposition(|b| *b == b'\n') {
                if self.ends_before(&block[newline + 1..until]) {
                    return Ok(Some(start + until as u64));
                }
                until = newline + 1;
            }
            if until > LINE_MAX {
                // The line is longer than any line of a runtime, so the search ends here.
                return Ok(Some(start + until as u64));
            }
            carry = block[..until].to_vec();
            end = start;
        }
        Ok(self.ends_before(&carry).then_some(carry.len() as u64))
    }

    /// Counts a line. The lines are passed from the last to the first. Returns true for the line before the wanted
    /// lines.
    fn ends_before(&mut self, line: &[u8]) -> bool {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let Some(line) = Line::parse(line) else { return self.wanted == 0 && !line.is_empty() };
        if !line.is_partial || !self.is_open {
            // This part is the last part of a line, or the end of the log.
            if self.lines >= self.wanted {
                return true;
            }
            self.lines += 1;
            self.is_open = true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("coracle-logfiles-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir");
        dir
    }

    fn line(tag: &str, text: &str) -> String {
        format!("2026-01-01T00:00:00Z stdout {tag} {text}\n")
    }

    #[test]
    fn rotated_files_come_before_the_current_one() {
        let dir = dir("order");
        for name in [
            "0.log",
            "0.log.20260102-000000",
            "0.log.20260101-000000",
            "0.log.20260101-000000.5",
            "0.log.20250101-000000.gz",
            "0.log.tmp",
            "10.log",
        ] {
            fs::write(dir.join(name), name).expect("file");
        }
        let names: Vec<_> = all(&dir.join("0.log"))
            .iter()
            .map(|p| p.file_name().expect("name").to_string_lossy().into_owned())
            .collect();
        assert_eq!(
            names,
            ["0.log.20260101-000000", "0.log.20260101-000000.5", "0.log.20260102-000000", "0.log"]
        );
        let inode = |name: &str| fs::metadata(dir.join(name)).expect("file").ino();
        assert_eq!(after(&dir.join("0.log"), inode("0.log.20260102-000000")), Some(dir.join("0.log")));
        assert_eq!(after(&dir.join("0.log"), inode("0.log")), None);
        assert_eq!(after(&dir.join("0.log"), 1), Some(dir.join("0.log.20260101-000000")));
        fs::remove_dir_all(dir).expect("clean up");
    }

    #[test]
    fn a_tail_counts_whole_lines_over_all_files() {
        let dir = dir("tail");
        let long = "x".repeat(100_000);
        let (old, new) = (dir.join("0.log.20260101-000000"), dir.join("0.log"));
        let first = [line("F", "a"), line("P", "b"), line("F", "b")];
        let second = [line("F", &long), line("P", "d"), line("P", "d"), line("F", "d")];
        fs::write(&old, first.concat()).expect("file");
        fs::write(&new, second.concat()).expect("file");
        let files = [old.clone(), new.clone()];
        let at = |count| tail(&files, count, &|| false).expect("tail");
        let length = |lines: &[String]| lines.iter().map(String::len).sum::<usize>() as u64;
        assert_eq!(at(0), (1, length(&second)));
        assert_eq!(at(1), (1, length(&second[..1])));
        assert_eq!(at(2), (0, length(&first)), "which is the start of the second file");
        assert_eq!(at(3), (0, length(&first[..1])));
        assert_eq!((at(4), at(99)), ((0, 0), (0, 0)));
        fs::write(&new, [line("F", "a"), line("P", "to come")].concat()).expect("file");
        assert_eq!(tail(&[new], 1, &|| false).expect("tail"), (0, line("F", "a").len() as u64));
        fs::remove_dir_all(dir).expect("clean up");
    }

    #[test]
    fn an_absent_log_is_empty() {
        assert_eq!(tail(&[PathBuf::from("/nonexistent/0.log")], 5, &|| false).expect("tail"), (0, 0));
    }

    #[test]
    fn a_cancelled_search_reads_no_further_block() {
        let dir = dir("cancelled");
        let path = dir.join("0.log");
        fs::write(&path, line("F", "text").repeat(20_000)).expect("file");
        let blocks = std::cell::Cell::new(0);
        let is_cancelled = || {
            blocks.set(blocks.get() + 1);
            blocks.get() > 2
        };
        assert_eq!(tail(&[path], 19_000, &is_cancelled).expect("tail"), (0, 0));
        assert_eq!(blocks.get(), 3);
        fs::remove_dir_all(dir).expect("clean up");
    }
}
