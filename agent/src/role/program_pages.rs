//! Code and free memory that only a start, or work that is done, needed goes back to the kernel.
#![allow(unsafe_code, reason = "advice about memory has no safe wrapper")]

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;

/// By when a start has been made, and how long nothing happens before the node is at rest.
const REST: Duration = Duration::from_secs(3);

/// Lets go of the program's pages a while after the start.
pub(super) async fn let_go_after_start() {
    tokio::time::sleep(REST).await;
    let_go();
}

/// The same whenever nothing has become of any pod for a while after something had. A node at rest has no timer.
pub(super) async fn let_go_at_rest(mut changes: watch::Receiver<()>) {
    while changes.changed().await.is_ok() {
        while let Ok(Ok(())) = tokio::time::timeout(REST, changes.changed()).await {}
        let_go();
    }
}

/// Some 10 MB of the program are mapped by a start, and by the first pods, since the kernel maps sixteen pages for
/// each that is wanted. What is wanted later is mapped again, from memory as a rule; what is not, the kernel may use
/// for something else.
fn let_go() {
    crate::allocator::collect();
    let (Ok(program), Ok(maps)) = (fs::read_link("/proc/self/exe"), fs::read_to_string("/proc/self/maps"))
    else {
        return;
    };
    for (start, length) in maps.lines().filter_map(|line| code_of(line, &program)) {
        // SAFETY: code is read from its file and never written, so that what is let go of comes back as it was.
        if unsafe { libc::madvise(start as *mut libc::c_void, length, libc::MADV_DONTNEED) } != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "cannot let go of the program's code");
        }
    }
}

/// Address and length of a mapping that is code of the program (proc_pid_maps(5)).
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
    fn only_the_programs_own_code_is_meant() {
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
