//! Limits a kind of log message to one line per source and interval. Each logged line reports the number of suppressed
//! lines.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Interval between two lines about one source.
const INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of sources with a separate count. All other sources share one count.
const SOURCES: usize = 64;
/// Time for which a source without new lines is kept, so that its suppressed lines are reported.
const RETENTION: Duration = Duration::from_secs(600);

/// Limits the lines about one kind of event.
#[derive(Debug, Default)]
pub struct LogLimit {
    sources: Mutex<HashMap<u128, SourceLines>>,
}

/// The lines about one source.
#[derive(Debug)]
struct SourceLines {
    /// Time of the last logged line.
    logged: Instant,
    /// Lines suppressed since then.
    suppressed: u64,
}

impl LogLimit {
    /// Returns `None` if this line must be suppressed. Otherwise returns the number of lines suppressed since
    /// the last logged line.
    pub fn allow(&self, address: IpAddr) -> Option<u64> {
        self.allow_at(address, Instant::now())
    }

    /// As [`allow`](Self::allow), for lines without a known source: one line per interval.
    pub fn allow_without_source(&self) -> Option<u64> {
        self.allow(Ipv6Addr::UNSPECIFIED.into())
    }

    fn allow_at(&self, address: IpAddr, now: Instant) -> Option<u64> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let mut source = super::source(address);
        if !sources.contains_key(&source) && sources.len() >= SOURCES {
            sources.retain(|_, lines| {
                let kept = if lines.suppressed > 0 { RETENTION } else { INTERVAL };
                now.duration_since(lines.logged) < kept
            });
            if sources.len() >= SOURCES {
                source = super::source(Ipv6Addr::from_bits(u128::MAX).into());
            }
        }
        match sources.get_mut(&source) {
            Some(lines) if now.duration_since(lines.logged) < INTERVAL => {
                lines.suppressed += 1;
                None
            }
            Some(lines) => {
                lines.logged = now;
                Some(std::mem::take(&mut lines.suppressed))
            }
            None => {
                sources.insert(source, SourceLines { logged: now, suppressed: 0 });
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_source_and_interval_is_logged() {
        let (limit, begin) = (LogLimit::default(), Instant::now());
        let from = |host: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(host));
        assert_eq!(limit.allow_at(from(1), begin), Some(0));
        assert_eq!(limit.allow_at(from(2), begin), Some(0));
        for _ in 0..1000 {
            assert_eq!(limit.allow_at(from(1), begin), None);
        }
        assert_eq!(limit.allow_at(from(1), begin + INTERVAL), Some(1000));
        let passed = (0..10_000).filter(|host| limit.allow_at(from(*host), begin).is_some()).count();
        assert!(passed <= SOURCES, "{passed} lines of 10000 sources");
    }

    #[test]
    fn entries_of_inactive_sources_are_evicted() {
        let (limit, begin) = (LogLimit::default(), Instant::now());
        let from = |host: u32| IpAddr::from(std::net::Ipv4Addr::from_bits(host));
        for host in 0..64 {
            assert!(limit.allow_at(from(host), begin).is_some());
            assert!(limit.allow_at(from(host), begin).is_none());
        }
        let passed =
            |at: Instant| (100..120).filter(|host| limit.allow_at(from(*host), at).is_some()).count();
        assert_eq!(passed(begin), 1, "the other sources share one line");
        assert_eq!(passed(begin + RETENTION), 20);
    }
}
