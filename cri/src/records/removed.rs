//! Records of removed objects. Each record is kept until a listener received the deletion event, so that the next start
//! can replay it. The record is renamed, not written again, so a removal costs only one additional rename.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use coracle_error_chain::chain;
use serde::de::DeserializeOwned;
use tracing::warn;

use super::file::{FILE, later_version, remove};
use super::{ContainerRecord, Records, SandboxRecord};
use crate::error::Error;
use crate::json_file::replace_json;

/// The removed object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Subject {
    Container(Box<ContainerRecord>),
    Sandbox(Box<SandboxRecord>),
}

/// A removal whose event may be undelivered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Removed {
    /// The number of its event.
    pub(crate) number: u64,
    /// Time of the removal.
    pub(crate) at: i64,
    pub(crate) subject: Subject,
    /// The record's file. It is removed when the event is delivered.
    pub(crate) file: PathBuf,
}

// === impl Subject ===

impl Subject {
    fn kind(&self) -> &'static str {
        match self {
            Self::Container(_) => "container",
            Self::Sandbox(_) => "sandbox",
        }
    }
}

// === impl Records ===

impl Records {
    /// Removes an object like [`Records::forget_container`] and [`Records::remove_sandbox`], but keeps its record. Returns the
    /// record's new path.
    pub(crate) fn move_removed(&self, subject: &Subject, number: u64, at: i64) -> Result<PathBuf, Error> {
        let file = self.removed.join(format!("{number}.{at}.{}", subject.kind()));
        let dir = match subject {
            Subject::Container(record) => self.container_dir(&record.id),
            Subject::Sandbox(record) => self.sandbox_dir(&record.id),
        };
        let record = dir.join(FILE);
        match std::fs::rename(&record, &file) {
            Ok(()) => {}
            // An earlier, failed call removed the record.
            Err(error) if error.kind() == ErrorKind::NotFound => match subject {
                Subject::Container(record) => replace_json(&file, record)?,
                Subject::Sandbox(record) => replace_json(&file, record)?,
            },
            Err(error) => return Err(Error::file("move away", &record)(error)),
        }
        remove(&dir).inspect_err(|_| {
            // The object still exists: its record must be found by the next call or the next start.
            if let Err(error) = std::fs::rename(&file, &record) {
                warn!(%error, record = %record.display(), "cannot move a record back");
            }
        })?;
        Ok(file)
    }

    /// All kept records of removed objects.
    pub(crate) fn removed(&self) -> Result<Vec<Removed>, Error> {
        let entries = std::fs::read_dir(&self.removed).map_err(Error::file("list", &self.removed))?;
        let mut found = Vec::new();
        for file in entries.flatten().map(|entry| entry.path()) {
            match read(&file) {
                Some(removed) => found.push(removed),
                None if may_be_read_later(std::fs::read(&file)) => {}
                None => remove_record(&file),
            }
        }
        Ok(found)
    }
}

/// Removes the record of a removed object after the delivery, or if it is unreadable.
pub(crate) fn remove_record(file: &Path) {
    if let Err(error) = coracle_tree::remove_file(file) {
        warn!(%error, file = %file.display(), "cannot remove the record of a removed object");
    }
}

/// Whether a later start may read the record and replay its event. True for a record of a later version, and if the
/// kernel refused to read the record.
fn may_be_read_later(record: std::io::Result<Vec<u8>>) -> bool {
    match record {
        Ok(record) => later_version(&record).is_some(),
        Err(error) => coracle_tree::is_refusal(&error),
    }
}

fn read(file: &Path) -> Option<Removed> {
    let mut name = file.file_name()?.to_str()?.split('.');
    let (number, at) = (name.next()?.parse().ok()?, name.next()?.parse().ok()?);
    let subject = match name.next()? {
        "container" => Subject::Container(decode(file)?),
        "sandbox" => Subject::Sandbox(decode(file)?),
        _ => return None,
    };
    Some(Removed { number, at, subject, file: file.to_owned() })
}

fn decode<T: DeserializeOwned>(file: &Path) -> Option<T> {
    let bytes = std::fs::read(file).ok()?;
    if later_version(&bytes).is_some() {
        return None;
    }
    let decoded = serde_json::from_slice(&bytes);
    decoded
        .inspect_err(|error| warn!(error = chain(error), "cannot read the record of a removed object"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::super::tests::records;
    use super::*;

    #[test]
    fn only_an_absent_or_damaged_record_is_given_up() {
        let fails_with = |errno: i32| may_be_read_later(Err(std::io::Error::from_raw_os_error(errno)));
        assert!(fails_with(libc::EACCES) && fails_with(libc::EMFILE) && !fails_with(libc::ENOENT));
        assert!(may_be_read_later(Ok(br#"{"version":1000}"#.to_vec())));
        assert!(!may_be_read_later(Ok(b"{".to_vec())));
    }

    #[test]
    fn a_removed_record_is_kept_until_it_is_forgotten() {
        let dir = tempfile::tempdir().expect("directory");
        let records = records(dir.path());
        let record = SandboxRecord::new("a", Default::default(), String::new(), 7);
        records.write_sandbox(&record).expect("write");
        std::fs::write(records.sandbox_dir("a").join("hosts"), "").expect("write");
        let subject = Subject::Sandbox(Box::new(record));
        let file = records.move_removed(&subject, 12, 7).expect("move_removed");
        assert!(!records.sandbox_dir("a").exists());
        let removed = Removed { number: 12, at: 7, subject: subject.clone(), file: file.clone() };
        assert_eq!(records.removed().expect("list"), [removed]);
        remove_record(&file);
        assert_eq!(records.removed().expect("list"), []);
        // The call succeeds even if an earlier, incomplete removal has already removed the record.
        let file = records.move_removed(&subject, 13, 8).expect("move_removed");
        assert_eq!(read(&file), Some(Removed { number: 13, at: 8, subject, file: file.clone() }));
        // An unreadable record is not kept.
        std::fs::write(&file, "{").expect("write");
        assert_eq!(records.removed().expect("list"), []);
        assert!(!file.exists());
    }
}
