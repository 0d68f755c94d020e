//! `hostPath`: a path of the host, checked against the type that the volume names.
//!
//! The path may be on a server that does not respond.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::HostPathVolumeSource;

use super::error::SetUpError;
use super::run_blocking;

pub(super) const PLUGIN: &str = "kubernetes.io~host-path";

/// Checks the path, and creates it if its type says so. `place` is the kubelet's path of the volume.
pub(super) async fn mount(source: &HostPathVolumeSource, place: &Path) -> Result<PathBuf, SetUpError> {
    let of = source.clone();
    run_blocking(place, Path::new(&source.path), move || check(&of)).await
}

fn check(source: &HostPathVolumeSource) -> Result<PathBuf, SetUpError> {
    let path = Path::new(&source.path);
    if path.components().any(|part| part == std::path::Component::ParentDir) {
        return Err(SetUpError::Path(source.path.clone()));
    }
    let is =
        |check: fn(&fs::FileType) -> bool| fs::metadata(path).is_ok_and(|found| check(&found.file_type()));
    let (right, wanted) = match source.type_.as_deref().unwrap_or("") {
        "" => (true, ""),
        "DirectoryOrCreate" => {
            make_dir(path)?;
            (is(fs::FileType::is_dir), "a directory")
        }
        "FileOrCreate" => {
            make_file(path)?;
            (is(fs::FileType::is_file), "a file")
        }
        "Directory" => (is(fs::FileType::is_dir), "a directory"),
        "File" => (is(fs::FileType::is_file), "a file"),
        "Socket" => (is(FileTypeExt::is_socket), "a socket file"),
        "CharDevice" => (is(FileTypeExt::is_char_device), "a character device"),
        "BlockDevice" => (is(FileTypeExt::is_block_device), "a block device"),
        _ => (false, "of a type that exists"),
    };
    if right {
        Ok(path.to_owned())
    } else {
        Err(SetUpError::HostPathType { path: source.path.clone(), wanted })
    }
}

fn make_dir(path: &Path) -> Result<(), SetUpError> {
    if path.exists() {
        return Ok(());
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .map_err(SetUpError::io("create the directory", path))
}

fn make_file(path: &Path) -> Result<(), SetUpError> {
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(SetUpError::io("create", path)(error))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use serde_json::json;

    use super::*;

    #[test]
    fn each_type_is_checked_and_two_types_are_created() {
        let dir = std::env::temp_dir().join(format!("coracle-hostpath-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir");
        let try_it = |name: &str, kind: &str| {
            let source = json!({"path": dir.join(name), "type": kind});
            check(&serde_json::from_value(source).expect("source")).map_err(|error| error.to_string())
        };
        assert!(try_it("absent", "").is_ok());
        assert!(try_it("absent", "Directory").is_err());
        assert!(try_it("made/deep", "DirectoryOrCreate").is_ok());
        assert!(try_it("made/deep", "Directory").is_ok());
        assert!(try_it("made/deep", "File").expect_err("a directory").ends_with("is not a file"));
        assert!(try_it("made/file", "FileOrCreate").is_ok());
        assert!(try_it("made/file", "File").is_ok());
        assert!(try_it("nowhere/file", "FileOrCreate").is_err());
        assert!(try_it("made/file", "Socket").is_err());
        assert!(try_it("../escape", "").is_err());
        assert!(
            check(
                &serde_json::from_value(json!({"path": "/dev/null", "type": "CharDevice"})).expect("source")
            )
            .is_ok()
        );
        fs::remove_dir_all(&dir).expect("clean up");
    }

    #[tokio::test]
    async fn a_path_that_does_not_respond_leaves_one_thread() {
        let dir = tempfile::tempdir().expect("directory");
        let (place, other) = (dir.path().join("one"), dir.path().join("other"));
        let source: HostPathVolumeSource =
            serde_json::from_value(json!({"path": "/", "type": "Directory"})).expect("source");
        let (release, released) = std::sync::mpsc::channel::<()>();
        let mut blocked = Box::pin(coracle_cri::blocking::run(&place, move |_| released.recv().is_ok()));
        assert!((&mut blocked).now_or_never().is_none());
        let refused = mount(&source, &place).await.expect_err("the first check is not done");
        assert!(matches!(refused, SetUpError::Blocked { .. }), "{refused}");
        mount(&source, &other).await.expect("the volume of another pod");
        drop(release);
        assert!(!blocked.await.expect("not blocked any more"));
    }
}
