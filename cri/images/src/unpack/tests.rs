//! Valid and invalid layers, unpacked and checked on disk.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tempfile::TempDir;
use xattr::FileExt as _;

use super::{TooLarge, UnpackError, Unpacked, unpack};
use crate::config::Limits;
use crate::digest::Digest;
use crate::fixture::{TestTar, attributes, gzip, random_bytes, zstd, zstd_with_large_window};

fn unpacked(tar: TestTar) -> (TempDir, Unpacked) {
    let bytes = tar.finish();
    let into = tempfile::tempdir().unwrap();
    let unpacked = unpack(bytes.as_slice(), into.path(), &Limits::default()).unwrap();
    assert_eq!(unpacked.diff_id, Digest::of(&bytes));
    (into, unpacked)
}

fn refused(tar: TestTar) -> (TempDir, UnpackError) {
    let into = tempfile::tempdir().unwrap();
    let root = into.path().join("root");
    std::fs::create_dir(&root).unwrap();
    let error = unpack(tar.finish().as_slice(), &root, &Limits::default()).unwrap_err();
    (into, error)
}

fn is_whiteout(path: &Path) -> bool {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    metadata.file_type().is_char_device() && metadata.rdev() == 0
}

fn opaque(path: &Path) -> Option<Vec<u8>> {
    xattr::get(path, "trusted.overlay.opaque").unwrap()
}

#[test]
fn a_layer_unpacks_the_same_with_any_compression() {
    let tar = TestTar::new().directory("d/").file("d/f", b"content").finish();
    for blob in [tar.clone(), gzip(&tar), zstd(&tar), [gzip(&tar[..700]), gzip(&tar[700..])].concat()] {
        let into = tempfile::tempdir().unwrap();
        let unpacked = unpack(blob.as_slice(), into.path(), &Limits::default()).unwrap();
        assert_eq!(unpacked.diff_id, Digest::of(&tar));
        assert_eq!(std::fs::read(into.path().join("d/f")).unwrap(), b"content");
        // Reads one byte at a time, as from a slow connection.
        let slow = std::io::BufReader::with_capacity(1, blob.as_slice());
        let into = tempfile::tempdir().unwrap();
        assert_eq!(unpack(slow, into.path(), &Limits::default()).unwrap(), unpacked);
    }
}

#[test]
fn modes_owners_times_and_links_are_kept() {
    let (into, unpacked) = unpacked(
        TestTar::new()
            .with(b'5', "tmp", "", attributes(0o1777, 0, 0, 1_100_000_000))
            .with(b'0', "tmp/suid", "", attributes(0o4755, 12, 34, 1_200_000_000))
            .hard_link("tmp/again", "tmp/suid")
            .symlink("link", "/etc/../anywhere")
            .with(b'3', "null", "1:3", attributes(0o666, 0, 5, 5))
            .with(b'6', "fifo", "", attributes(0o600, 1, 1, 5)),
    );
    let stat = |name: &str| std::fs::symlink_metadata(into.path().join(name)).unwrap();
    assert_eq!((stat("tmp").mode() & 0o7777, stat("tmp").mtime()), (0o1777, 1_100_000_000));
    let suid = stat("tmp/suid");
    assert_eq!((suid.mode() & 0o7777, suid.uid(), suid.gid(), suid.nlink()), (0o4755, 12, 34, 2));
    assert_eq!((suid.mtime(), suid.ino()), (1_200_000_000, stat("tmp/again").ino()));
    assert_eq!(std::fs::read_link(into.path().join("link")).unwrap(), Path::new("/etc/../anywhere"));
    assert_eq!((stat("null").rdev(), stat("null").mode() & 0o7777), (0x103, 0o666));
    assert!(stat("fifo").file_type().is_fifo());
    assert_eq!(unpacked.inodes, 5);
    assert!(unpacked.implied.is_empty());
}

#[test]
fn extended_headers_give_names_attributes_and_times() {
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(200));
    // The value is a file capability: cap_net_raw, effective.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let (into, unpacked) = unpacked(
        TestTar::new()
            .pax(&[
                ("path", long.as_bytes()),
                ("mtime", b"1350244992.5"),
                ("uid", b"3000000"),
                ("SCHILY.xattr.security.capability", &capability),
                ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
                ("SCHILY.xattr.user.note", b"kept"),
            ])
            .file("short", b"data")
            .entry(b'L', "././@LongLink", "", format!("gnu/{}\0", "g".repeat(180)).as_bytes())
            .file("cut", b"x"),
    );
    let path = into.path().join(&long);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(
        (metadata.uid(), metadata.mtime(), metadata.mtime_nsec()),
        (3_000_000, 1_350_244_992, 500_000_000)
    );
    let file = std::fs::File::open(&path).unwrap();
    assert_eq!(file.get_xattr("security.capability").unwrap().as_deref(), Some(capability.as_slice()));
    assert_eq!(file.get_xattr("trusted.overlay.opaque").unwrap(), None);
    assert!(into.path().join("gnu").join("g".repeat(180)).is_file());
    assert_eq!(unpacked.implied, ["d".repeat(150), "gnu".to_owned()]);
}

#[test]
fn whiteouts_become_those_of_overlayfs() {
    let (into, _) = unpacked(
        TestTar::new()
            .file(".wh.gone", b"")
            .directory("d")
            .file("d/.wh..wh..opq", b"")
            .file("d/stays", b"")
            .file("new/.wh.sub", b"")
            .file(".wh..wh.plnk", b"")
            .file(".wh.replaced", b"")
            .file("replaced", b"file")
            .file(".wh.now-a-directory", b"")
            .directory("now-a-directory")
            .file("before/f", b"")
            .file(".wh.before", b"")
            .file(".wh.through", b"")
            .file("through/f", b""),
    );
    let at = |name: &str| into.path().join(name);
    assert!(is_whiteout(&at("gone")) && is_whiteout(&at("new/sub")));
    assert_eq!(opaque(&at("d")).as_deref(), Some(b"y".as_slice()));
    assert!(at("d/stays").is_file() && at("replaced").is_file() && at("before/f").is_file());
    assert!(!at(".wh..wh.plnk").exists() && !at(".wh..wh..opq").exists());
    for name in ["now-a-directory", "before", "through"] {
        assert_eq!(opaque(&at(name)).as_deref(), Some(b"y".as_slice()), "{name}");
    }
    assert!(at("through/f").is_file());
}

#[test]
fn many_opaque_whiteouts_keep_the_entries_of_their_layer() {
    let whiteout = |tar: TestTar, _| tar.file("d/.wh..wh..opq", b"");
    let tar = (0..100).fold(TestTar::new(), |tar, n| tar.file(&format!("d/{n}"), b""));
    let (layer, unpacked) = unpacked((0..1000).fold(tar, whiteout));
    let d = layer.path().join("d");
    assert_eq!(std::fs::read_dir(&d).unwrap().count(), 100);
    assert_eq!(opaque(&d).as_deref(), Some(b"y".as_slice()));
    assert_eq!(unpacked.inodes, 101, "100 files and their directory");
}

/// CVE-2026-95838: each opaque whiteout read the entries of its directory, which took quadratic time.
#[test]
fn cve_2026_95838_an_opaque_whiteout_does_not_read_its_directory() {
    let into = tempfile::tempdir().unwrap();
    let d = into.path().join("d");
    std::fs::create_dir(&d).unwrap();
    let reads = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
    reads.add_watch(&d, AddWatchFlags::IN_ACCESS).unwrap();
    let with_opaque_whiteout =
        |tar: TestTar, n: u32| tar.file(&format!("d/{n}"), b"").file("d/.wh..wh..opq", b"");
    let tar = (0..100).fold(TestTar::new(), with_opaque_whiteout).finish();
    unpack(tar.as_slice(), into.path(), &Limits::default()).unwrap();
    assert_eq!(reads.read_events().unwrap_err(), Errno::EAGAIN, "the directory was read");
    assert_eq!(std::fs::read_dir(&d).unwrap().count(), 100);
    assert!(!reads.read_events().unwrap().is_empty(), "a read causes an event");
}

#[test]
fn later_entries_replace_earlier_entries() {
    let (into, _) = unpacked(
        TestTar::new()
            .file("a", b"first and longer")
            .file("a", b"second")
            .file("tree/x/y", b"")
            .file("tree", b"now a file")
            .symlink("s", "a")
            .file("s", b"no link any more")
            .directory("d")
            .with(b'5', "d", "", attributes(0o700, 0, 0, 7)),
    );
    let read = |name: &str| std::fs::read_to_string(into.path().join(name)).unwrap();
    assert_eq!(
        (read("a").as_str(), read("tree").as_str(), read("s").as_str()),
        ("second", "now a file", "no link any more")
    );
    assert_eq!(std::fs::metadata(into.path().join("d")).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn names_that_lead_out_are_refused() {
    for path in ["../evil", "a/../../evil", "/../evil", "..", "./../evil/x", "../.wh.evil"] {
        let (into, error) = refused(TestTar::new().file("fine", b"").file(path, b"evil"));
        assert!(matches!(error, UnpackError::Escape { .. }), "{path}: {error}");
        assert!(!into.path().join("evil").exists(), "{path}");
    }
    let (_into, error) = refused(TestTar::new().hard_link("passwd", "../../../../etc/passwd"));
    assert!(matches!(error, UnpackError::Escape { .. }), "{error}");
    let (_into, error) = refused(TestTar::new().pax(&[("path", b"../evil")]).file("x", b""));
    assert!(matches!(error, UnpackError::Escape { .. }), "{error}");
}

#[test]
fn absolute_names_and_links_stay_inside() {
    let outside = tempfile::tempdir().unwrap();
    let target = outside.path().to_str().unwrap();
    let climbing = format!("../../../../../../../../../..{target}");
    let (into, _) = unpacked(
        TestTar::new()
            .file("/absolute", b"")
            .directory(target)
            .symlink("direct", target)
            .file("direct/evil", b"inside")
            .symlink("climbing", &climbing)
            .file("climbing/evil2", b"inside")
            .file("climbing/.wh.hidden", b"")
            .hard_link("linked", "direct/evil"),
    );
    assert!(into.path().join("absolute").is_file());
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 0);
    let inside = into.path().join(target.trim_start_matches('/'));
    assert_eq!(std::fs::read(inside.join("evil")).unwrap(), b"inside");
    assert!(inside.join("evil2").is_file() && is_whiteout(&inside.join("hidden")));
    assert_eq!(std::fs::metadata(into.path().join("linked")).unwrap().nlink(), 2);
}

#[test]
fn links_to_the_outside_are_neither_followed_nor_linked() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    let path = secret.to_str().unwrap();
    // The link itself is replaced; its target is not written.
    let (into, _) = unpacked(TestTar::new().symlink("s", path).file("s", b"mine").directory("s2"));
    assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
    assert_eq!(std::fs::read(into.path().join("s")).unwrap(), b"mine");
    // An absolute target of a hard link is a path in the image. The link is recorded, so that a lower layer can have the
    // target.
    let (into, layer) = unpacked(TestTar::new().hard_link("h", path));
    assert_eq!(links(&layer), [("h".to_owned(), path.trim_start_matches('/').to_owned())]);
    assert_eq!(std::fs::read(into.path().join("h")).unwrap(), b"");
    // A directory entry replaces a link by a directory. The mode of the link's target does not change.
    let (_into, _) = unpacked(TestTar::new().symlink("d", outside.path().to_str().unwrap()).with(
        b'5',
        "d",
        "",
        attributes(0o777, 9, 9, 1),
    ));
    assert_eq!(std::fs::metadata(outside.path()).unwrap().uid(), 0);
    assert_eq!(std::fs::metadata(&secret).unwrap().nlink(), 1);
}

/// CVE-2025-47290: a directory became a link between the check of a path and its use.
#[test]
fn cve_2025_47290_a_directory_that_becomes_a_link_meanwhile_does_not_lead_outside() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "secret").unwrap();
    std::fs::set_permissions(outside.path(), std::fs::Permissions::from_mode(0o710)).unwrap();
    let before = (std::fs::metadata(outside.path()).unwrap(), std::fs::metadata(&secret).unwrap());
    // The layer has no entry for the directory itself. Such an entry would replace the link permanently.
    let layer = TestTar::new()
        .file("swapped/secret", b"mine")
        .directory("swapped/deep")
        .file("swapped/deep/file", b"mine")
        .hard_link("swapped/again", "swapped/secret")
        .symlink("swapped/deep/link", "/etc")
        .file("swapped/.wh.secret", b"")
        .finish();
    let into = tempfile::tempdir().unwrap();
    let (swapped, link) = (into.path().join("swapped"), into.path().join("link"));
    std::fs::create_dir(&swapped).unwrap();
    std::os::unix::fs::symlink(outside.path(), &link).unwrap();
    let done = AtomicBool::new(false);
    let exchanged = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                renameat_with(CWD, &swapped, CWD, &link, RenameFlags::EXCHANGE).unwrap();
            }
        });
        for _ in 0..500 {
            // An entry may be a link at the moment of its use. The layer is refused then.
            let _ = unpack(layer.as_slice(), into.path(), &Limits::default());
        }
        done.store(true, Ordering::Relaxed);
        other.join()
    });
    exchanged.unwrap();
    assert_eq!(std::fs::read(&secret).unwrap(), b"secret");
    assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1, "something was made outside");
    let after = (std::fs::metadata(outside.path()).unwrap(), std::fs::metadata(&secret).unwrap());
    for (before, after) in [(&before.0, &after.0), (&before.1, &after.1)] {
        let of = |file: &std::fs::Metadata| (file.mode(), file.uid(), file.ctime(), file.ctime_nsec());
        assert_eq!(of(before), of(after));
    }
}

fn links(layer: &Unpacked) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_owned()).unwrap();
    layer.links.iter().map(|link| (text(&link.path), text(&link.target))).collect()
}

#[test]
fn links_to_lower_layers_are_deferred_unless_replaced() {
    let (into, layer) = unpacked(
        TestTar::new()
            .directory("real")
            .symlink("way", "/real")
            .hard_link("way/first", "./lower/file")
            .hard_link("second", "way/first")
            .hard_link("replaced", "lower/file")
            .file("replaced", b"mine")
            .hard_link("over/it", "lower/file")
            .directory("over/it")
            .hard_link("gone/x", "lower/file")
            .file("gone", b"no directory any more")
            .hard_link("hidden", "lower/file")
            .file(".wh.hidden", b"")
            .file(".wh.anew", b"")
            .hard_link("anew", "lower/file")
            .hard_link("self", "self"),
    );
    let wait = |path: &str, target: &str| (path.to_owned(), target.to_owned());
    let expected = [
        wait("real/first", "lower/file"),
        wait("second", "way/first"),
        wait("hidden", "lower/file"),
        wait("anew", "lower/file"),
    ];
    assert_eq!(links(&layer), expected);
    assert_eq!(std::fs::read(into.path().join("replaced")).unwrap(), b"mine");
    assert!(!into.path().join("self").exists());
}

#[test]
fn links_to_later_entries_or_directories_are_refused() {
    for later in [
        TestTar::new().hard_link("h", "f").file("f", b"later"),
        TestTar::new().hard_link("h", "later").hard_link("later", "lower/file"),
    ] {
        let (_into, error) = refused(later);
        assert!(matches!(error, UnpackError::LinkOrder { .. }), "{error}");
    }
    for directory in [TestTar::new().directory("d").hard_link("h", "d"), TestTar::new().hard_link("h", "/")] {
        let (_into, error) = refused(directory);
        assert!(matches!(error, UnpackError::LinkTarget { .. }), "{error}");
    }
}

#[test]
fn invalid_whiteouts_and_entries_are_refused() {
    for name in [".wh.", "d/.wh..", ".wh..."] {
        let (_into, error) = refused(TestTar::new().file(name, b""));
        assert!(matches!(error, UnpackError::WhiteoutName { .. }), "{name}: {error}");
    }
    let device = |kind: u8, number: &str| {
        refused(TestTar::new().with(kind, "device", number, attributes(0o666, 0, 0, 0))).1
    };
    assert!(matches!(device(b'3', "0:0"), UnpackError::WhiteoutDevice { .. }));
    for number in ["4096:0", "0:1048576", "4097:3"] {
        for kind in [b'3', b'4'] {
            let error = device(kind, number);
            assert!(matches!(error, UnpackError::DeviceNumber { .. }), "{number}: {error}");
        }
    }
    let (_into, error) = refused(TestTar::new().file("f", b"").file("f/g", b""));
    assert!(matches!(error, UnpackError::Write { .. }), "{error}");
    let (_into, error) = refused(TestTar::new().entry(b'M', "multi-volume", "", b""));
    assert!(matches!(error, UnpackError::Archive(_)), "{error}");
    let (_into, error) =
        refused(TestTar::new().raw(b'0', "f", "", &attributes(0o644, 0, 0, 0), b"short", 1 << 33));
    assert!(matches!(error, UnpackError::Read(_)), "{error}");
    let (_into, error) = refused(TestTar::new().raw(b'L', "x", "", &attributes(0, 0, 0, 0), b"", 1 << 30));
    assert!(matches!(error, UnpackError::Archive(_)), "{error}");
}

#[test]
fn damaged_streams_are_refused() {
    let good = gzip(&TestTar::new().file("f", &random_bytes(100_000)).finish());
    let mut flipped = good.clone();
    flipped[50_000] ^= 1;
    for bad in
        [&good[..good.len() / 2], &good[..good.len() - 4], &flipped, b"this is not a tar archive at all"]
    {
        let into = tempfile::tempdir().unwrap();
        assert!(unpack(bad, into.path(), &Limits::default()).is_err());
    }
}

#[test]
fn bombs_are_stopped_at_their_limit() {
    let zeros = vec![0; 8 << 20];
    let tar = TestTar::new().file("zeros", &zeros).finish();
    let limits = Limits { ratio_from: 1 << 20, ..Limits::default() };
    let unpack_with = |limits: &Limits, blob: &[u8]| {
        let into = tempfile::tempdir().unwrap();
        match unpack(blob, into.path(), limits).unwrap_err() {
            UnpackError::TooLarge(limit) => limit,
            other => panic!("{other}"),
        }
    };
    assert_eq!(unpack_with(&Limits { ratio: 100, ..limits }, &gzip(&tar)), TooLarge::Ratio(100));
    assert_eq!(unpack_with(&limits, &zstd(&tar)), TooLarge::Ratio(250));
    assert_eq!(unpack_with(&Limits { layer_bytes: 1 << 20, ..limits }, &tar), TooLarge::Bytes(1 << 20));
    let many = (0..20).fold(TestTar::new(), |tar, n| tar.file(&n.to_string(), b"")).finish();
    assert_eq!(unpack_with(&Limits { layer_entries: 10, ..limits }, &many), TooLarge::Entries(10));
    let small = zstd_with_large_window(&TestTar::new().file("a", b"").finish());
    let narrow = Limits { zstd_window_log: 25, ..limits };
    assert_eq!(unpack_with(&narrow, &small), TooLarge::Window(1 << 25));
    assert!(unpack(&small[..], tempfile::tempdir().unwrap().path(), &limits).is_ok());
    let huge = TestTar::new().pax(&[("GNU.sparse.size", b"99999999999999"), ("GNU.sparse.map", b"")]);
    assert!(matches!(unpack_with(&limits, &huge.file("sparse", b"").finish()), TooLarge::Sparse(_)));
}

#[test]
fn sparse_files_keep_their_holes() {
    let in_header = TestTar::new()
        .pax(&[
            ("GNU.sparse.size", b"1000000"),
            ("GNU.sparse.map", b"0,4,500000,3"),
            ("GNU.sparse.name", b"s"),
        ])
        .file("GNUSparseFile.0/s", b"headmid");
    let mut map = b"2\n0\n4\n500000\n3\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(b"headmid");
    let in_data = TestTar::new()
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"s"),
            ("GNU.sparse.realsize", b"1000000"),
        ])
        .file("GNUSparseFile.0/s", &map);
    for tar in [in_header, in_data] {
        let (into, _) = unpacked(tar.file("after", b"after"));
        let bytes = std::fs::read(into.path().join("s")).unwrap();
        assert_eq!(
            (bytes.len(), &bytes[..5], &bytes[500_000..500_004]),
            (1_000_000, b"head\0".as_slice(), b"mid\0".as_slice())
        );
        assert!(std::fs::metadata(into.path().join("s")).unwrap().blocks() < 100);
        assert!(into.path().join("after").is_file());
    }
    let (_into, error) = refused(
        TestTar::new().pax(&[("GNU.sparse.size", b"10"), ("GNU.sparse.map", b"8,4")]).file("s", b"data"),
    );
    assert!(matches!(error, UnpackError::Archive(_)), "{error}");
}

#[test]
fn archives_of_gnu_tar_are_read() {
    let from = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(from.path().join("a/b")).unwrap();
    std::fs::write(from.path().join("a/b").join("n".repeat(150)), "long").unwrap();
    let sparse = std::fs::File::create(from.path().join("sparse")).unwrap();
    std::os::unix::fs::FileExt::write_at(&sparse, b"end", 3 << 20).unwrap();
    for format in ["gnu", "pax"] {
        let output = std::process::Command::new("tar")
            .args(["--sparse", "--format", format, "-C"])
            .arg(from.path())
            .args(["-cf", "-", "."])
            .output()
            .unwrap();
        assert!(output.status.success());
        let into = tempfile::tempdir().unwrap();
        unpack(output.stdout.as_slice(), into.path(), &Limits::default()).unwrap();
        assert_eq!(std::fs::read(into.path().join("a/b").join("n".repeat(150))).unwrap(), b"long");
        let sparse = std::fs::read(into.path().join("sparse")).unwrap();
        assert_eq!((sparse.len(), &sparse[3 << 20..]), ((3 << 20) + 3, b"end".as_slice()), "{format}");
    }
}

/// A GNU header with the next entry's name or link target.
fn long(tar: TestTar, kind: u8, name: &str) -> TestTar {
    tar.entry(kind, "././@LongLink", "", format!("{name}\0").as_bytes())
}

#[test]
fn links_do_not_nest_directories_deeper_than_a_path_can_be() {
    let half = "d/".repeat(950);
    let mut tar = long(TestTar::new(), b'L', &half).directory("d");
    let mut deepest = half.clone();
    for number in 0..8 {
        let link = format!("l{number}");
        tar = long(tar, b'K', &deepest).symlink(&link, "d");
        deepest = format!("{link}/{half}");
        tar = long(tar, b'L', &deepest).directory("d");
    }
    let (_into, error) = refused(tar);
    assert!(matches!(error, UnpackError::TooLarge(TooLarge::Path)), "{error:?}");
    let (_into, error) = refused(long(TestTar::new(), b'L', &"d/".repeat(2100)).directory("d"));
    assert!(matches!(error, UnpackError::TooLarge(TooLarge::Path)), "{error:?}");
}

#[test]
fn a_repeated_directory_is_kept_once_with_its_last_time() {
    let mut tar = TestTar::new();
    for time in 1..=1000 {
        tar = tar.with(b'5', "d/e", "", attributes(0o755, 0, 0, time));
    }
    let (into, unpacked) = unpacked(tar);
    assert_eq!(std::fs::metadata(into.path().join("d/e")).unwrap().mtime(), 1000);
    assert_eq!(unpacked.implied, ["d".to_owned()]);
}

#[test]
fn implied_directories_and_the_names_that_are_kept_are_limited() {
    let into = tempfile::tempdir().unwrap();
    let limits = Limits { layer_entries: 20, ..Limits::default() };
    let tar = TestTar::new().file(&format!("{}f", "d/".repeat(30)), b"").finish();
    let error = unpack(tar.as_slice(), into.path(), &limits).unwrap_err();
    assert!(matches!(error, UnpackError::TooLarge(TooLarge::Entries(20))), "{error:?}");

    // Each directory is replaced by a file and made again. The files are in memory, because on a disk
    // this takes minutes.
    let into = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut tar = TestTar::new();
    let steep = format!("a/{}f", "d/".repeat(1500));
    for _ in 0..32 {
        tar = long(tar.file("a", b"").directory("a"), b'L', &steep).file("f", b"");
    }
    let error = unpack(tar.finish().as_slice(), into.path(), &Limits::default()).unwrap_err();
    assert!(
        matches!(error, UnpackError::TooLarge(TooLarge::Names(_))),
        "cut short: {:.100}",
        error.to_string()
    );
}

#[test]
fn an_attribute_too_large_for_a_file_is_not_reported_as_a_full_disk() {
    // The first value is larger than ext4's space for attributes, the second is larger than any file system accepts.
    for bytes in [60_000, 70_000] {
        let value = vec![b'x'; bytes];
        let tar = TestTar::new().pax(&[("SCHILY.xattr.user.large", &value)]).file("f", b"").finish();
        let into = tempfile::tempdir().unwrap();
        match unpack(tar.as_slice(), into.path(), &Limits::default()) {
            Ok(_) => {
                let file = std::fs::File::open(into.path().join("f")).unwrap();
                let found = file.get_xattr("user.large").unwrap();
                assert!(bytes < 65_536 && found.is_none_or(|found| found == value));
            }
            Err(error) => {
                assert_eq!(error.kind(), crate::ErrorKind::Unsupported, "{error:?}");
                assert!(
                    error.to_string().contains("user.large") && error.to_string().contains("\"f\""),
                    "{error}"
                );
            }
        }
    }
}
