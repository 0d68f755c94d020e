//! Returns memory to the kernel: code and free memory that were only needed by the start or by finished work.
#![allow(unsafe_code, reason = "advice about memory has no safe wrapper")]

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;

/// Time after which a start is complete, and after which a node without events is idle.
const REST: Duration = Duration::from_secs(3);

/// Releases the program's pages some time after the start.
pub(super) async fn let_go_after_start() {
    tokio::time::sleep(REST).await;
    let_go();
}

/// Releases them again each time the node becomes idle after changes of pods. An idle node has no timer.
pub(super) async fn let_go_at_rest(mut changes: watch::Receiver<()>) {
    while changes.changed().await.is_ok() {
        while let Ok(Ok(())) = tokio::time::timeout(REST, changes.changed()).await {}
        let_go();
    }
}

/// Releases about 10 MB of mapped code: the kernel maps sixteen pages for each page that is used. Code that is needed
/// later is mapped again, usually from the page cache.
fn let_go() {
    crate::allocator::collect();
    let (Ok(program), Ok(maps)) = (fs::read_link("/proc/self/exe"), fs::read_to_string("/proc/self/maps"))
    else {
        return;
    };
    for (start, length) in maps.lines().filter_map(|line| code_of(line, &program)) {
        // SAFETY: code is mapped from its file and never written, so that released pages have the same content when
        // they are loaded again.
        if unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "cannot release the program's code");
        }
    }
}

/// Address and length of a line's mapping if it is code of the program (proc_pid_maps(5)).
fn code_of(line: &str, program: &Path) -> Option<(usize, usize)> {
    let (range, rest) = line.split_once(' ')?;
    let path = rest.starts_with("r-xp").then(|| rest.find('/').map(|at| Path::new(&rest[at..])))??;
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    (path == program).then_some((start, end.checked_sub(start)?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::code_of;

    #[test]
    fn only_the_programs_own_code_is_released() {
        let of = |line| code_of(line, Path::new("/usr/bin/coracle"));
        assert_eq!(
            of("00400000-00402000 r-xp 00001000 fe:00 7      /usr/bin/coracle"),
            Some((0x40_0000, 0x2000))
        );
        for other in [
            "00402000-00403000 r--p 00003000 fe:00 7      /usr/bin/coracle",
            "00403000-00404000 rw-p 00003000 fe:00 7      /usr/bin/coracle",
            "7f0000000000-7f0000001000 r-xp 00000000 fe:00 8      /usr/lib/libc.so",
            "7fff00000000-7fff00001000 r-xp 00000000 00:00 0      [vdso]",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
