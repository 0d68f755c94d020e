//! Which process may send which word of a report. Pure.
//!
//! The first sender is the child that the shim forked. It may name a successor, and the process that it made: these
//! may send the rest. Each word counts once.

use std::mem::{Discriminant, discriminant};

use super::Word;

/// Words kept of senders that are not named yet: the kernel does not order the messages of two processes.
const MOST_EARLY: usize = 8;

/// The senders of one report.
#[derive(Debug, Default)]
pub(super) struct Owing {
    senders: Vec<i32>,
    heard: Vec<Discriminant<Word>>,
    early: Vec<(i32, Word)>,
}

// === impl Owing ===

impl Owing {
    pub(super) fn expect(&mut self, pid: i32) {
        self.senders.push(pid);
    }

    /// The words that count now that this one came.
    pub(super) fn admit(&mut self, sender: i32, word: Word) -> Vec<Word> {
        // The library's processes log causes before any of them is named. A cause only adds to the text of a failure.
        if matches!(word, Word::Cause(_)) {
            return vec![word];
        }
        if !self.senders.contains(&sender) {
            if self.early.len() < MOST_EARLY {
                self.early.push((sender, word));
            }
            return Vec::new();
        }
        let kind = discriminant(&word);
        if self.heard.contains(&kind) {
            return Vec::new();
        }
        self.heard.push(kind);
        let named = match word {
            Word::Successor(pid) | Word::Pid(pid) => pid,
            word => return vec![word],
        };
        self.expect(named);
        let early = std::mem::take(&mut self.early);
        let mut admitted: Vec<Word> = vec![word];
        for (sender, word) in early {
            admitted.append(&mut self.admit(sender, word));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_once_and_from_the_processes_that_were_named() {
        let mut owing = Owing::default();
        owing.expect(10);
        assert_eq!(owing.admit(11, Word::Pid(12)), []);
        assert_eq!(owing.admit(12, Word::Ready), []);
        assert_eq!(owing.admit(99, Word::SharesPids), []);
        let all = [Word::Successor(11), Word::Pid(12), Word::Ready];
        assert_eq!(owing.admit(10, Word::Successor(11)), all);
        assert_eq!(owing.admit(10, Word::Pid(1)), []);
        assert_eq!(owing.admit(12, Word::Successor(99)), []);
        assert_eq!(owing.admit(99, Word::SharesPids), []);
    }

    #[test]
    fn strangers_fill_no_memory() {
        let mut owing = Owing::default();
        (0..1000).for_each(|_| assert_eq!(owing.admit(99, Word::Ready), []));
        assert_eq!(owing.early.len(), MOST_EARLY);
    }
}
