//! Opens paths below a directory while other processes rename files.

use std::io;

use rustix::io::Errno;

/// Maximum attempts to open a path.
const ATTEMPTS: usize = 1000;

/// Repeats an openat2(2) that ends with EAGAIN. If any process of the machine renames a file while the kernel resolves a
/// `..` below a directory, the kernel cannot exclude that the `..` led out of the directory.
///
/// # Errors
/// The error of the call; EAGAIN after 1,000 attempts.
pub fn open_despite_renames<T, E>(mut open: impl FnMut() -> Result<T, E>) -> Result<T, E>
where
    E: Copy + Into<io::Error>,
{
    let is_renamed = |error: E| Errno::from_io_error(&error.into()) == Some(Errno::AGAIN);
    let mut last = open();
    for _ in 1..ATTEMPTS {
        match last {
            Err(error) if is_renamed(error) => last = open(),
            done => return done,
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_that_meets_renames_is_repeated_a_limited_number_of_times() {
        let open_after = |failures: usize, error: Errno| {
            let mut calls = 0;
            let opened = open_despite_renames(|| {
                calls += 1;
                if calls > failures { Ok(()) } else { Err(error) }
            });
            (opened, calls)
        };
        assert_eq!(open_after(0, Errno::AGAIN), (Ok(()), 1));
        assert_eq!(open_after(ATTEMPTS - 1, Errno::AGAIN), (Ok(()), ATTEMPTS));
        assert_eq!(open_after(usize::MAX, Errno::AGAIN), (Err(Errno::AGAIN), ATTEMPTS));
        assert_eq!(open_after(1, Errno::NOENT), (Err(Errno::NOENT), 1));
    }
}
