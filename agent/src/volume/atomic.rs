//! Atomic replacement of a set of files: a reader sees the old set or the new set.
//!
//! ```text
//! volume/..2026_11_21_07_08_04.1234567/user   the files, never changed once visible
//! volume/..data                             → the directory above; replaced by one rename
//! volume/user                               → ..data/user, created once
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};

use super::error::SetUpError;
use super::ownership;
use super::payload::{File, Payload};

const DATA: &str = "..data";
const NEW_DATA: &str = "..data_tmp";
/// Name of a new file until it replaces the old file. No path in a volume begins with `..`.
const NEW_FILE: &str = "..file_tmp";

/// Replaces the content of the volume's directory. If the directory already has this content, only the rest of an
/// interrupted replacement is removed.
pub(super) fn write(volume: &Path, payload: &Payload, group: Option<u32>) -> Result<(), SetUpError> {
    if let Some(bad) = payload.keys().find(|path| !is_inside(path)) {
        return Err(SetUpError::Path(bad.clone()));
    }
    let old = fs::read_link(volume.join(DATA)).ok();
    let top_names: BTreeSet<&str> = payload.keys().map(|path| top(path)).collect();
    if let Some(name) = old.as_deref().and_then(Path::to_str)
        && has_payload(&volume.join(name), payload)
        && top_names.iter().all(|top| volume.join(top).is_symlink())
    {
        return remove_others(volume, name, &top_names);
    }
    let name = format!("..{}", jiff::Timestamp::now().strftime("%Y_%m_%d_%H_%M_%S.%f"));
    let dir = volume.join(&name);
    fill(&dir, payload, group).inspect_err(|_| drop(fs::remove_dir_all(&dir)))?;
    swap(volume, &name)?;
    link(volume, &top_names)?;
    remove_others(volume, &name, &top_names)
}

/// Replaces one file of the content, and keeps the other files. Readers see the old file or the new file.
pub(super) fn replace(volume: &Path, path: &str, file: &File, group: Option<u32>) -> Result<(), SetUpError> {
    if !is_inside(path) {
        return Err(SetUpError::Path(path.to_owned()));
    }
    let (new, at) = (volume.join(DATA).join(NEW_FILE), volume.join(DATA).join(path));
    if fs::read(&at).is_ok_and(|found| found == file.data) {
        return Ok(());
    }
    // A crash before the rename leaves this file.
    let _ = fs::remove_file(&new);
    let renamed = || -> Result<(), SetUpError> {
        write_file(&new, file).map_err(SetUpError::io("write", &new))?;
        if let Some(group) = group {
            ownership::set_file_group(&new, group).map_err(SetUpError::io("set the owner of", &new))?;
        }
        fs::rename(&new, &at).map_err(SetUpError::io("replace", &at))
    };
    renamed().inspect_err(|_| drop(fs::remove_file(&new)))
}

/// Whether the volume's directory has content.
pub(super) fn exists(volume: &Path) -> bool {
    volume.join(DATA).is_symlink()
}

/// Whether an item's path stays in the volume and avoids the names that the replacement uses.
fn is_inside(path: &str) -> bool {
    let parts: Vec<Component<'_>> = Path::new(path).components().collect();
    !path.is_empty()
        && !path.starts_with("..")
        && parts.iter().all(|part| matches!(part, Component::Normal(_)))
}

fn top(path: &str) -> &str {
    path.split('/').next().unwrap_or(path)
}

fn has_payload(dir: &Path, payload: &Payload) -> bool {
    let same = |(path, file): (&String, &File)| fs::read(dir.join(path)).is_ok_and(|data| data == file.data);
    payload.iter().all(same) && count(dir).is_ok_and(|files| files == payload.len())
}

fn count(dir: &Path) -> io::Result<usize> {
    let mut files = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        files += if entry.file_type()?.is_dir() { count(&entry.path())? } else { 1 };
    }
    Ok(files)
}

fn fill(dir: &Path, payload: &Payload, group: Option<u32>) -> Result<(), SetUpError> {
    fs::create_dir(dir).map_err(SetUpError::io("create the directory", dir))?;
    ownership::chmod(dir, 0o755).map_err(SetUpError::io("set the mode of", dir))?;
    for (path, file) in payload {
        let at = dir.join(path);
        make_parents(dir, path)?;
        write_file(&at, file).map_err(SetUpError::io("write", &at))?;
    }
    match group {
        Some(group) => {
            ownership::set_group(dir, group, true).map_err(SetUpError::io("set the owner of", dir))
        }
        None => Ok(()),
    }
}

/// Creates the directories of a nested path, readable by all users, independent of the umask.
fn make_parents(dir: &Path, path: &str) -> Result<(), SetUpError> {
    let mut at = dir.to_owned();
    for part in Path::new(path).parent().into_iter().flat_map(Path::components) {
        at.push(part);
        if !at.exists() {
            fs::create_dir(&at).map_err(SetUpError::io("create the directory", &at))?;
            ownership::chmod(&at, 0o755).map_err(SetUpError::io("set the mode of", &at))?;
        }
    }
    Ok(())
}

fn write_file(at: &Path, file: &File) -> io::Result<()> {
    let mut open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(at)?;
    open.write_all(&file.data)?;
    if file.owner.is_some() {
        lchown(at, file.owner, None)?;
    }
    ownership::chmod(at, file.mode)
}

fn swap(volume: &Path, name: &str) -> Result<(), SetUpError> {
    let (new, data) = (volume.join(NEW_DATA), volume.join(DATA));
    // A crash between the two calls below leaves this link.
    let _ = fs::remove_file(&new);
    symlink(name, &new).map_err(SetUpError::io("create the link", &new))?;
    fs::rename(&new, &data).map_err(SetUpError::io("rename", &data))
}

fn link(volume: &Path, top_names: &BTreeSet<&str>) -> Result<(), SetUpError> {
    for top in top_names {
        let at = volume.join(top);
        match symlink(Path::new(DATA).join(top), &at) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && at.is_symlink() => {}
            made => made.map_err(SetUpError::io("create the link", &at))?,
        }
    }
    Ok(())
}

/// Removes links of removed keys and directories of earlier content.
fn remove_others(volume: &Path, name: &str, top_names: &BTreeSet<&str>) -> Result<(), SetUpError> {
    let read = |error| SetUpError::io("read", volume)(error);
    for entry in fs::read_dir(volume).map_err(read)? {
        let entry = entry.map_err(read)?;
        let path: PathBuf = entry.path();
        let file_name = entry.file_name();
        let keep = file_name
            .to_str()
            .is_some_and(|found| found == name || found == DATA || top_names.contains(found));
        if keep {
            continue;
        }
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let removed = if is_dir { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.map_err(SetUpError::io("remove", &path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let dir = std::env::temp_dir().join(format!("coracle-atomic-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).expect("temp dir");
            Scratch(dir)
        }

        fn shows(&self, path: &str) -> Option<String> {
            fs::read_to_string(self.0.join(path)).ok()
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> = fs::read_dir(&self.0)
                .expect("volume")
                .map(|e| e.expect("entry").file_name().into_string().expect("text"))
                .filter(|n| !n.starts_with("..2"))
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn payload(files: &[(&str, &str)]) -> Payload {
        files
            .iter()
            .map(|(path, data)| {
                ((*path).to_owned(), File { data: data.as_bytes().to_vec(), mode: 0o640, owner: None })
            })
            .collect()
    }

    #[test]
    fn a_new_payload_replaces_all_files_of_the_old_one() {
        let volume = Scratch::new("replace");
        write(&volume.0, &payload(&[("a", "1"), ("deep/b", "2")]), None).expect("first");
        assert_eq!((volume.shows("a").as_deref(), volume.shows("deep/b").as_deref()), (Some("1"), Some("2")));
        assert_eq!(fs::metadata(volume.0.join("a")).expect("file").mode() & 0o777, 0o640);
        write(&volume.0, &payload(&[("a", "3"), ("c", "4")]), None).expect("second");
        assert_eq!(volume.names(), ["..data", "a", "c"]);
        assert_eq!((volume.shows("a").as_deref(), volume.shows("deep/b")), (Some("3"), None));
        assert_eq!(fs::read_dir(&volume.0).expect("volume").count(), 4, "one directory of content");
    }

    #[test]
    fn an_equal_payload_changes_no_file() {
        let volume = Scratch::new("same");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("first");
        let before = fs::read_link(volume.0.join(DATA)).expect("link");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("second");
        assert_eq!(fs::read_link(volume.0.join(DATA)).expect("link"), before);
    }

    #[test]
    fn a_crash_between_two_steps_is_repaired() {
        let volume = Scratch::new("crash");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("first");
        symlink("..gone", volume.0.join(NEW_DATA)).expect("left by a crash");
        fs::remove_file(volume.0.join("a")).expect("not yet linked");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("again");
        assert_eq!(volume.shows("a").as_deref(), Some("1"));
        assert_eq!(volume.names(), ["..data", "a"]);
    }

    #[test]
    fn content_that_a_crash_left_is_removed_though_the_new_content_is_complete() {
        let volume = Scratch::new("rest");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("first");
        // A crash after the rename: the former content, and the link of a removed key.
        fs::create_dir(volume.0.join("..2000_01_01")).expect("former content");
        fs::write(volume.0.join("..2000_01_01/b"), "removed secret").expect("former content");
        symlink("..data/b", volume.0.join("b")).expect("former link");
        write(&volume.0, &payload(&[("a", "1")]), None).expect("again");
        assert_eq!(volume.names(), ["..data", "a"]);
        assert_eq!(volume.shows("a").as_deref(), Some("1"));
        assert_eq!(fs::read_dir(&volume.0).expect("volume").count(), 3, "one directory of content");
    }

    #[test]
    fn an_empty_set_is_an_empty_volume() {
        let volume = Scratch::new("empty");
        write(&volume.0, &payload(&[]), None).expect("write");
        assert_eq!(volume.names(), ["..data"]);
    }

    #[test]
    fn paths_out_of_the_volume_are_rejected_before_a_write() {
        let volume = Scratch::new("escape");
        for bad in ["../x", "/x", "a/../../x", "..data", "", "./x", "a/./b/../c"] {
            let refused = write(&volume.0, &payload(&[(bad, "1")]), None);
            assert!(matches!(refused, Err(SetUpError::Path(_))), "{bad}");
        }
        assert_eq!(volume.names(), Vec::<String>::new());
    }

    #[test]
    fn the_group_may_read() {
        let volume = Scratch::new("group");
        write(&volume.0, &payload(&[("a", "1")]), Some(4321)).expect("write");
        let file = fs::metadata(volume.0.join("a")).expect("file");
        assert_eq!((file.gid(), file.mode() & 0o777), (4321, 0o640));
    }
}
