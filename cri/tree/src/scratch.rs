//! Test fixtures: deep directory trees, and threads with few resources.

use std::fs;
use std::path::Path;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;

/// A temporary directory in memory, for trees that would take minutes on a disk.
pub(crate) fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("directory")
}

/// Makes `levels` nested directories, each called `down`, by renaming, so that no path is long.
pub(crate) fn deep(top: &Path, levels: usize) {
    let (down, next) = (top.join("down"), top.join("next"));
    fs::create_dir_all(&down).expect("make");
    for _ in 1..levels {
        fs::create_dir(&next).expect("make");
        fs::rename(&down, next.join("down")).expect("rename");
        fs::rename(&next, &down).expect("rename");
    }
}

/// Runs `work` on a small stack, with a low limit of descriptors. The limit is the whole process's: tests that run at the same
/// time need up to 64 descriptors each.
pub(crate) fn with_few_resources(work: impl FnOnce() + Send) {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
    setrlimit(Resource::RLIMIT_NOFILE, most.min(1024), most).expect("limit");
    std::thread::scope(|scope| {
        let small = std::thread::Builder::new().stack_size(64 << 10);
        let done = small.spawn_scoped(scope, work).expect("thread").join();
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
}
