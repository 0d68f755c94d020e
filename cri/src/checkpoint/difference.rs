//! The changed files of a container's root file system: the contents of its writable layer.
//!
//! The container is frozen during this work, but other processes can still change its files: a container in the same
//! pid namespace can reach its root. So its files are untrusted: they are not opened by path, links are not followed,
//! and only regular files are opened for reading.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CStr, OsStr};
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, Mode, OFlags, ResolveFlags, SeekFrom, openat, openat2, readlinkat, seek, statat,
};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header, HeaderMode};

use super::archive::builder;
use super::attributes;

/// Maximum length of a path (`PATH_MAX` without the final NUL).
const MAX_PATH: usize = 4095;
/// Maximum bytes of the paths that are kept while an archive is written: the paths of deleted files, and of files with
/// several names. A container determines their number and lengths. A restore refuses longer lists of deleted files.
const NAMES_MAX: usize = 64 << 20;
/// Bytes that count for each kept path in addition to its length.
const NAME_OVERHEAD: usize = 64;
/// Maximum data segments of a sparse file. The archive's builder keeps the list of segments in memory. A restore
/// refuses longer lists, and counts the end of the file as a segment.
const SEGMENTS_MAX: usize = (1 << 16) - 1;

/// Archives the contents of a writable layer. Returns the paths that the layer deletes from lower layers. Mount points
/// are left out, because they belong to the runtime.
pub(super) fn archive(
    upper: &Path,
    lower: &[PathBuf],
    mounted: &[PathBuf],
    to: &Path,
) -> io::Result<BTreeSet<PathBuf>> {
    let mut writing = Writing {
        lower,
        mounted: mounted.iter().filter_map(|place| place.strip_prefix("/").ok()).collect(),
        archive: builder(BufWriter::new(File::create(to)?)),
        deleted: BTreeSet::new(),
        linked: HashMap::new(),
        names_left: NAMES_MAX,
    };
    let mut current = WalkPath::default();
    writing.add_directory(&File::open(upper)?, Path::new(""))?;
    let mut written = Ok(());
    let walked = coracle_tree::walk(upper, |found| {
        if written.is_ok() {
            let there = current.go(found.depth, found.name);
            let opened = there.and_then(|()| open(found.dir, found.name));
            written = match opened {
                Ok(Some(file)) => writing.add(file, current.path()),
                Ok(None) => Ok(()),
                Err(error) => Err(error),
            };
        }
    });
    written.and(walked)?;
    writing.archive.into_inner()?.flush()?;
    Ok(writing.deleted)
}

/// The current path of the walk.
#[derive(Debug, Default)]
struct WalkPath {
    path: Vec<u8>,
    /// End of each path component.
    ends: Vec<usize>,
}

/// An archive that is being written.
struct Writing<'a> {
    lower: &'a [PathBuf],
    mounted: BTreeSet<&'a Path>,
    archive: Builder<BufWriter<File>>,
    deleted: BTreeSet<PathBuf>,
    /// Files with several names: the first name, and the number of names that are not in the archive yet.
    linked: HashMap<(u64, u64), (PathBuf, u64)>,
    /// Bytes that are left for the paths in `deleted` and `linked`.
    names_left: usize,
}

/// Opens an entry as a path descriptor, without following a link. `None` if the entry is gone.
fn open(dir: impl AsFd, name: &CStr) -> io::Result<Option<File>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match openat(dir, name, flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        opened => Ok(Some(File::from(opened?))),
    }
}

/// Path of an open file in /proc.
fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Whether a directory of the writable layer hides the lower directories of the same path (overlayfs documentation).
fn is_opaque(directory: &File) -> bool {
    let value = xattr::get_deref(proc_path(directory), "trusted.overlay.opaque");
    value.is_ok_and(|value| value.as_deref() == Some(b"y"))
}

/// A directory of a lower layer. A link on the way is refused, because the link hides the directory and can lead
/// outside of the layer.
fn lower_directory(layer: &Path, path: &Path) -> Option<Dir> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let layer: OwnedFd = openat(CWD, layer, flags, Mode::empty()).ok()?;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    Dir::new(openat2(layer, path, flags, Mode::empty(), resolve).ok()?).ok()
}

/// Refuses a sparse file with more than `most` data segments. Sets the file's offset to 0.
fn limit_segments(file: &File, most: usize) -> io::Result<()> {
    let mut end = 0;
    let next = || {
        let start = seek(file, SeekFrom::Data(end)).ok()?;
        end = seek(file, SeekFrom::Hole(start)).ok()?;
        Some(())
    };
    if std::iter::from_fn(next).take(most + 1).count() > most {
        let why = format!("a sparse file has more than {most} segments");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, why));
    }
    seek(file, SeekFrom::Start(0))?;
    Ok(())
}

/// Bytes of [`NAMES_MAX`] that a path takes.
fn cost(path: &Path) -> usize {
    path.as_os_str().len() + NAME_OVERHEAD
}

fn header(metadata: &Metadata) -> Header {
    let mut header = Header::new_gnu();
    header.set_metadata_in_mode(metadata, HeaderMode::Complete);
    header
}

// === impl WalkPath ===

impl WalkPath {
    /// Goes to an entry of the directory at this depth.
    fn go(&mut self, depth: usize, name: &CStr) -> io::Result<()> {
        self.ends.truncate(depth);
        self.path.truncate(self.ends.last().copied().unwrap_or_default());
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.path.extend_from_slice(name.to_bytes());
        self.ends.push(self.path.len());
        // A longer path could not be restored.
        if self.path.len() > MAX_PATH { Err(Errno::NAMETOOLONG.into()) } else { Ok(()) }
    }

    fn path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.path))
    }
}

// === impl Writing ===

impl Writing<'_> {
    fn add(&mut self, file: File, path: &Path) -> io::Result<()> {
        let metadata = file.metadata()?;
        let kind = metadata.file_type();
        if kind.is_char_device() && metadata.rdev() == 0 {
            self.add_deleted(Path::new("/").join(path))?;
        } else if path.ancestors().any(|above| self.mounted.contains(above)) {
        } else if kind.is_dir() {
            self.add_directory(&file, path)?;
        } else if kind.is_socket() {
            // A socket is left out, because it is useless without its listener.
        } else if let Some(first) = self.first_name(&metadata, path)? {
            let mut header = header(&metadata);
            header.set_entry_type(EntryType::Link);
            header.set_size(0);
            self.archive.append_link(&mut header, path, first)?;
        } else if kind.is_symlink() {
            let target = readlinkat(&file, c"", Vec::new())?.into_bytes();
            let target = PathBuf::from(std::ffi::OsString::from_vec(target));
            self.archive.append_link(&mut header(&metadata), path, target)?;
        } else if kind.is_file() {
            self.add_content(&file, path)?;
        } else {
            self.add_attributes(&file, path)?;
            self.add_special(&metadata, path)?;
        }
        Ok(())
    }

    /// Adds a directory. The layer itself has an empty path: the container's `/`.
    fn add_directory(&mut self, directory: &File, path: &Path) -> io::Result<()> {
        self.add_attributes(directory, path)?;
        let name = if path.as_os_str().is_empty() { Path::new("./") } else { path };
        self.archive.append_data(&mut header(&directory.metadata()?), name, io::empty())?;
        if is_opaque(directory) { self.add_hidden(directory, path) } else { Ok(()) }
    }

    /// The name under which a file with several names was archived first.
    fn first_name(&mut self, metadata: &Metadata, path: &Path) -> io::Result<Option<PathBuf>> {
        let more = metadata.nlink().saturating_sub(1);
        if more == 0 {
            return Ok(None);
        }
        let file = (metadata.dev(), metadata.ino());
        let Some((first, left)) = self.linked.get_mut(&file) else {
            self.keep(path)?;
            self.linked.insert(file, (path.to_owned(), more));
            return Ok(None);
        };
        *left -= 1;
        if *left > 0 {
            return Ok(Some(first.clone()));
        }
        let first = self.linked.remove(&file).map(|(first, _)| first);
        self.names_left += first.as_deref().map_or(0, cost);
        Ok(first)
    }

    /// Subtracts a path that is kept from `names_left`.
    fn keep(&mut self, path: &Path) -> io::Result<()> {
        let left = self.names_left.checked_sub(cost(path));
        self.names_left = left.ok_or_else(|| {
            let why = format!("the paths of its deleted and linked files take more than {NAMES_MAX} bytes");
            io::Error::new(io::ErrorKind::FileTooLarge, why)
        })?;
        Ok(())
    }

    fn add_deleted(&mut self, path: PathBuf) -> io::Result<()> {
        self.keep(&path)?;
        self.deleted.insert(path);
        Ok(())
    }

    /// Adds the attributes of the next entry.
    fn add_attributes(&mut self, file: &File, path: &Path) -> io::Result<()> {
        let records = attributes::records(&proc_path(file), path)?;
        self.archive
            .append_pax_extensions(records.iter().map(|(key, value)| (key.as_str(), value.as_slice())))
    }

    fn add_content(&mut self, file: &File, path: &Path) -> io::Result<()> {
        // `file` is a path descriptor of a regular file: reopening it cannot reach another file.
        let mut content = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(proc_path(file))?;
        let before = content.metadata()?;
        limit_segments(&content, SEGMENTS_MAX)?;
        self.add_attributes(file, path)?;
        self.archive.append_file(path, &mut content)?;
        let after = content.metadata()?;
        let state = |of: &Metadata| (of.len(), of.ctime(), of.ctime_nsec());
        if state(&before) == state(&after) {
            return Ok(());
        }
        // Without this error the entry's size in the archive would be wrong.
        let why = format!("{} was changed while it was read", path.display());
        Err(io::Error::new(io::ErrorKind::Interrupted, why))
    }

    fn add_special(&mut self, metadata: &Metadata, path: &Path) -> io::Result<()> {
        let mut header = header(metadata);
        header.set_size(0);
        header.set_device_major(libc::major(metadata.rdev()))?;
        header.set_device_minor(libc::minor(metadata.rdev()))?;
        self.archive.append_data(&mut header, path, io::empty())
    }

    /// Records entries of lower layers below an opaque directory as deleted, unless the directory has an entry of the
    /// same name.
    fn add_hidden(&mut self, there: &File, path: &Path) -> io::Result<()> {
        for layer in self.lower {
            let Some(entries) = lower_directory(layer, path) else { continue };
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                let is_there = || statat(there, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
                if !matches!(name.to_bytes(), b"." | b"..") && !is_there() {
                    let name = OsStr::from_bytes(name.to_bytes());
                    self.add_deleted(Path::new("/").join(path).join(name))?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{Read, Seek as _};
    use std::os::unix::fs::{FileExt as _, symlink};

    use nix::sys::stat::{Mode as NixMode, SFlag, makedev, mknod};

    use super::*;

    /// The entries of an archive with their kind and content.
    fn content(path: &Path) -> BTreeMap<String, (tar::EntryType, String)> {
        let mut archive = tar::Archive::new(File::open(path).expect("archive"));
        let entries = archive.entries().expect("entries").map(|entry| {
            let mut entry = entry.expect("entry");
            let (path, mut text) = (entry.path().expect("path").display().to_string(), String::new());
            entry.read_to_string(&mut text).expect("text");
            (path.trim_end_matches('/').to_owned(), (entry.header().entry_type(), text))
        });
        entries.collect()
    }

    #[test]
    fn changed_files_are_archived_without_mount_points() {
        let dir = tempfile::tempdir().expect("directory");
        let upper = dir.path().join("upper");
        fs::create_dir_all(upper.join("etc/app")).expect("make");
        fs::create_dir_all(upper.join("data/below")).expect("make");
        fs::write(upper.join("etc/app/new"), "mine").expect("write");
        fs::write(upper.join("etc/hosts"), "").expect("write");
        symlink("new", upper.join("etc/app/link")).expect("link");
        symlink("/etc", upper.join("outside")).expect("link");
        std::os::unix::net::UnixListener::bind(upper.join("socket")).expect("socket");
        let to = dir.path().join("diff.tar");
        let mounted = ["/etc/hosts".into(), "/proc".into(), "/data".into()];
        let deleted = archive(&upper, &[], &mounted, &to).expect("archive");
        assert_eq!(deleted, BTreeSet::new());
        let found = content(&to);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, [".", "etc", "etc/app", "etc/app/link", "etc/app/new", "outside"]);
        assert_eq!(found["etc/app/new"].1, "mine");
        assert_eq!(found["outside"].0, tar::EntryType::Symlink);
    }

    #[test]
    fn devices_and_fifos_are_archived_without_being_opened() {
        let dir = tempfile::tempdir().expect("directory");
        let upper = dir.path().join("upper");
        fs::create_dir(&upper).expect("make");
        let mode = NixMode::from_bits_truncate(0o640);
        mknod(&upper.join("fifo"), SFlag::S_IFIFO, mode, 0).expect("a FIFO");
        // No driver has this number: opening the device would fail.
        let device = mknod(&upper.join("device"), SFlag::S_IFCHR, mode, makedev(250, 70_000)).is_ok();
        let whiteout = mknod(&upper.join("gone"), SFlag::S_IFCHR, mode, 0).is_ok();
        let to = dir.path().join("diff.tar");
        let deleted = archive(&upper, &[], &[], &to).expect("archive");
        let found = content(&to);
        assert_eq!(found["fifo"].0, tar::EntryType::Fifo);
        if device {
            assert_eq!(found["device"].0, tar::EntryType::Char);
            let mut archive = tar::Archive::new(File::open(&to).expect("archive"));
            let device = archive
                .entries()
                .expect("entries")
                .flatten()
                .find(|entry| entry.header().entry_type() == tar::EntryType::Char);
            let header = device.expect("there").header().clone();
            let number = (header.device_major().expect("major"), header.device_minor().expect("minor"));
            assert_eq!(number, (Some(250), Some(70_000)));
        }
        assert_eq!(deleted.contains(Path::new("/gone")), whiteout);
    }

    /// An empty archive. `names_left` is the number of bytes that are left for paths.
    fn writing(lower: &[PathBuf], names_left: usize) -> Writing<'_> {
        Writing {
            lower,
            mounted: BTreeSet::new(),
            archive: builder(BufWriter::new(tempfile::tempfile().expect("file"))),
            deleted: BTreeSet::new(),
            linked: HashMap::new(),
            names_left,
        }
    }

    /// The paths hidden below `a/b`.
    fn hidden_below(upper: &Path, lower: &[PathBuf]) -> BTreeSet<PathBuf> {
        let mut writing = writing(lower, NAMES_MAX);
        writing.add_hidden(&File::open(upper).expect("open"), Path::new("a/b")).expect("look");
        writing.deleted
    }

    #[test]
    fn the_names_that_are_kept_are_limited() {
        let dir = tempfile::tempdir().expect("directory");
        let (upper, lower) = (dir.path().join("upper"), dir.path().join("lower"));
        for made in [&upper, &lower.join("a/b")] {
            fs::create_dir_all(made).expect("make");
        }
        fs::write(lower.join("a/b/gone"), "").expect("write");
        let lower = [lower];
        let hide = |names_left: usize| {
            let mut writing = writing(&lower, names_left);
            writing.add_hidden(&File::open(&upper).expect("open"), Path::new("a/b"))
        };
        let needed = cost(Path::new("/a/b/gone"));
        assert!(hide(needed).is_ok());
        assert_eq!(hide(needed - 1).expect_err("too many").kind(), io::ErrorKind::FileTooLarge);

        // The name of a linked file is kept until all of its names were archived.
        fs::write(upper.join("one"), "").expect("write");
        fs::hard_link(upper.join("one"), upper.join("two")).expect("link");
        let metadata = fs::metadata(upper.join("one")).expect("there");
        let [one, two] = ["one", "two"].map(Path::new);
        let mut linking = writing(&[], cost(one));
        assert_eq!(linking.first_name(&metadata, one).expect("kept"), None);
        assert_eq!(linking.names_left, 0);
        assert_eq!(linking.first_name(&metadata, two).expect("known").as_deref(), Some(one));
        assert_eq!(linking.names_left, cost(one));
        linking.names_left -= 1;
        assert!(linking.first_name(&metadata, one).is_err());
    }

    #[test]
    fn the_segments_of_a_sparse_file_are_limited() {
        let mut file = tempfile::tempfile().expect("file");
        let data = [b'x'; 1 << 16];
        for place in 0..3 {
            file.write_all_at(&data, place << 22).expect("write");
        }
        assert!(limit_segments(&file, 3).is_ok());
        assert_eq!(file.read(&mut [0; 1]).expect("read"), 1);
        assert_eq!(file.stream_position().expect("position"), 1, "the file is read from its beginning");
        assert_eq!(limit_segments(&file, 2).expect_err("three").kind(), io::ErrorKind::FileTooLarge);
        assert!(limit_segments(&tempfile::tempfile().expect("file"), 0).is_ok(), "an empty file");
    }

    #[test]
    fn an_opaque_directory_deletes_lower_entries() {
        let dir = tempfile::tempdir().expect("directory");
        let (upper, lower) = (dir.path().join("upper/a/b"), dir.path().join("lower"));
        fs::create_dir_all(&upper).expect("make");
        fs::create_dir_all(lower.join("a/b")).expect("make");
        for name in ["kept", "gone"] {
            fs::write(lower.join("a/b").join(name), "old").expect("write");
        }
        fs::write(upper.join("kept"), "new").expect("write");
        assert_eq!(hidden_below(&upper, &[lower]), [PathBuf::from("/a/b/gone")].into());
    }

    #[test]
    fn a_link_in_a_lower_layer_is_not_followed() {
        let dir = tempfile::tempdir().expect("directory");
        let (upper, lower) = (dir.path().join("upper/a/b"), dir.path().join("lower"));
        for made in [&upper, &lower, &dir.path().join("host/b/secret")] {
            fs::create_dir_all(made).expect("make");
        }
        symlink(dir.path().join("host"), lower.join("a")).expect("link");
        assert_eq!(hidden_below(&upper, &[lower]), BTreeSet::new());
    }

    /// Names, kinds, modes, links and attributes of all entries in a directory.
    fn tree_state(top: &Path) -> BTreeMap<PathBuf, String> {
        let mut entries = BTreeMap::new();
        let mut left = vec![top.to_owned()];
        while let Some(path) = left.pop() {
            let metadata = fs::symlink_metadata(&path).expect("there");
            if metadata.is_dir() {
                left.extend(fs::read_dir(&path).expect("list").map(|entry| entry.expect("entry").path()));
            }
            let attributes: BTreeMap<_, _> = match metadata.is_symlink() {
                true => BTreeMap::new(),
                false => xattr::list(&path)
                    .expect("list")
                    .filter(|name| !name.as_encoded_bytes().starts_with(b"security.selinux"))
                    .map(|name| (name.clone(), xattr::get(&path, &name).expect("get")))
                    .collect(),
            };
            let name = path.strip_prefix(top).expect("below").to_owned();
            let owner = (metadata.uid(), metadata.gid(), metadata.mtime());
            let links = if metadata.is_dir() { 0 } else { metadata.nlink() };
            let what =
                format!("{:o} {owner:?} {links} {:x} {attributes:?}", metadata.mode(), metadata.rdev());
            entries.insert(name, what);
        }
        entries
    }

    #[test]
    fn attributes_links_whiteouts_and_the_root_are_restored() {
        let dir = tempfile::tempdir().expect("directory");
        let [upper, lower, restored] = ["upper", "lower", "restored"].map(|name| dir.path().join(name));
        for made in [upper.join("bin"), upper.join("made"), lower.join("made"), restored.clone()] {
            fs::create_dir_all(made).expect("make");
        }
        let long = upper.join("n".repeat(200));
        fs::write(upper.join("bin/ping"), "ping").expect("write");
        for name in ["bin/ping6", "other"] {
            fs::hard_link(upper.join("bin/ping"), upper.join(name)).expect("link");
        }
        fs::hard_link(upper.join("bin/ping"), &long).expect("link");
        symlink("ping", upper.join("bin/link")).expect("link");
        fs::hard_link(upper.join("bin/link"), upper.join("bin/link2")).expect("link");
        mknod(&upper.join("fifo"), SFlag::S_IFIFO, NixMode::from_bits_truncate(0o600), 0).expect("a FIFO");
        mknod(&upper.join("bin/gone"), SFlag::S_IFCHR, NixMode::empty(), 0).expect("a whiteout");
        // The attributes are the capability CAP_NET_RAW, and a value with arbitrary bytes.
        let capability = [1, 0, 0, 2, 0, 32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        xattr::set(&long, "security.capability", &capability).expect("capability");
        xattr::set(&long, "user.note", b"a=b\n\0\xff").expect("attribute");
        xattr::set(upper.join("bin"), "user.empty", b"").expect("attribute");
        xattr::set(&upper, "user.root", b"r").expect("attribute");
        fs::set_permissions(&upper, std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("mode");
        fs::write(upper.join("made/new"), "").expect("write");
        fs::write(lower.join("made/old"), "").expect("write");
        let holes = File::create(upper.join("holes")).expect("make");
        std::os::unix::fs::FileExt::write_all_at(&holes, b"end", 4 << 20).expect("write");
        xattr::set(upper.join("holes"), "user.note", b"sparse").expect("attribute");
        let expected = tree_state(&upper);
        assert!(expected[Path::new("other")].contains(" 4 0 {\"security.capability\""), "{expected:?}");
        xattr::set(upper.join("made"), "trusted.overlay.opaque", b"y").expect("opaque");

        let to = dir.path().join("diff.tar");
        let deleted = archive(&upper, &[lower], &[], &to).expect("archive");
        assert_eq!(deleted, ["/bin/gone", "/made/old"].map(PathBuf::from).into());
        // GNU tar extracts the same files.
        let gnu = dir.path().join("gnu");
        fs::create_dir(&gnu).expect("make");
        let mut tar = std::process::Command::new("tar");
        let tar = tar.args(["--xattrs", "--xattrs-include=*", "-C"]).arg(&gnu).arg("-xpf").arg(&to).output();
        let tar = tar.expect("GNU tar");
        assert!(tar.status.success() && tar.stderr.is_empty(), "{tar:?}");
        let mut all = expected.clone();
        all.remove(Path::new("bin/gone"));
        assert_eq!(tree_state(&gnu), all);
        let diff = io::BufReader::new(File::open(&to).expect("archive"));
        coracle_images::apply_changes(diff, &restored).expect("lay");
        coracle_images::apply_deletions(deleted.iter().map(PathBuf::as_path), &restored).expect("hide");
        let mut found = tree_state(&restored);
        let hidden = found.remove(Path::new("made/old")).expect("a whiteout");
        assert!(hidden.starts_with("20000 "), "{hidden}");
        // Whiteouts, and directories that get whiteouts, have a new modification time.
        let timeless = |entries: &BTreeMap<PathBuf, String>| {
            let all = entries
                .iter()
                .filter(|(name, _)| !["bin", "bin/gone", "made"].contains(&name.to_str().expect("text")));
            all.map(|(name, what)| (name.clone(), what.clone())).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(timeless(&found), timeless(&expected));
        let length = |layer: &Path| fs::metadata(layer.join("holes")).expect("there").len();
        assert_eq!(length(&restored), length(&upper));
        assert_eq!(xattr::get(restored.join("bin"), "user.empty").expect("get"), Some(Vec::new()));
        assert!(found[Path::new("bin/gone")].starts_with("20000 "));
    }

    #[test]
    fn the_holes_of_a_sparse_file_are_not_written() {
        let dir = tempfile::tempdir().expect("directory");
        let upper = dir.path().join("upper");
        fs::create_dir(&upper).expect("make");
        let file = File::create(upper.join("holes")).expect("make");
        std::os::unix::fs::FileExt::write_all_at(&file, b"end", 64 << 20).expect("write");
        let to = dir.path().join("diff.tar");
        archive(&upper, &[], &[], &to).expect("archive");
        assert!(to.metadata().expect("there").len() < 1 << 20);
        assert_eq!(content(&to)["holes"].1.len(), (64 << 20) + 3);
    }
}
