//! Lines that a process writes to a pipe.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Deadline of each line, for slow machines.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Iterator over the lines of a pipe, which a thread reads. It ends with the pipe.
pub struct Lines(Receiver<String>);

impl Lines {
    /// Starts to read the pipe.
    #[must_use]
    pub fn of(pipe: impl Read + Send + 'static) -> Self {
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(pipe).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).take_while(Result::is_ok).for_each(drop);
        });
        Self(receiver)
    }
}

impl Iterator for Lines {
    type Item = String;

    /// The next line.
    ///
    /// # Panics
    /// When the process writes no line in time.
    fn next(&mut self) -> Option<String> {
        match self.0.recv_timeout(TIMEOUT) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no line of output in time"),
        }
    }
}
