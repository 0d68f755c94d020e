//! Sets of completion indexes: `1,3-5,7`.

use std::fmt;

/// Sorted intervals that neither overlap nor adjoin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Indexes(Vec<Interval>);

/// All indexes from `first` to `last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Interval {
    first: i32,
    last: i32,
}

impl Indexes {
    /// Parses the indexes below `limit`. Malformed intervals are ignored, because the API server does not store them.
    pub(super) fn parse(text: &str, limit: i32) -> Self {
        let mut intervals = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            if let (Ok(first), Ok(last)) = (first.parse::<i32>(), last.parse::<i32>())
                && first <= last
                && first < limit
            {
                intervals.push(Interval { first, last: last.min(limit - 1) });
            }
        }
        Self::merged(intervals)
    }

    /// Adds indexes.
    pub(super) fn extend(&mut self, indexes: impl IntoIterator<Item = i32>) {
        let mut intervals = std::mem::take(&mut self.0);
        intervals.extend(indexes.into_iter().map(|index| Interval { first: index, last: index }));
        *self = Self::merged(intervals);
    }

    /// Adds the indexes of another set.
    pub(super) fn merge(&mut self, other: &Self) {
        let mut intervals = std::mem::take(&mut self.0);
        intervals.extend(&other.0);
        *self = Self::merged(intervals);
    }

    fn merged(mut intervals: Vec<Interval>) -> Self {
        intervals.sort_unstable();
        let mut merged: Vec<Interval> = Vec::with_capacity(intervals.len());
        for next in intervals {
            match merged.last_mut() {
                Some(before) if next.first <= before.last.saturating_add(1) => {
                    before.last = before.last.max(next.last);
                }
                Some(_) | None => merged.push(next),
            }
        }
        Self(merged)
    }

    /// Whether the set has this index.
    pub(super) fn has(&self, index: i32) -> bool {
        let place = self.0.partition_point(|interval| interval.last < index);
        self.0.get(place).is_some_and(|interval| interval.first <= index)
    }

    /// Number of indexes.
    pub(super) fn total(&self) -> i32 {
        self.0.iter().map(|interval| interval.last - interval.first + 1).sum()
    }

    /// The first `count` indexes below `limit` that are not in the set.
    pub(super) fn first_absent(&self, count: usize, limit: i32) -> Vec<i32> {
        let mut found = Vec::new();
        let mut next = 0;
        let end = Interval { first: limit, last: limit };
        for Interval { first, last } in self.0.iter().copied().chain([end]) {
            let room = count - found.len();
            found.extend((next..first.min(limit)).take(room));
            if found.len() == count {
                break;
            }
            next = last.saturating_add(1);
        }
        found
    }

    /// Number of indexes in both sets.
    pub(super) fn common(&self, other: &Self) -> i32 {
        let (mut left, mut right) = (self.0.iter().peekable(), other.0.iter().peekable());
        let mut total = 0;
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            total += (a.last.min(b.last) - a.first.max(b.first) + 1).max(0);
            if a.last < b.last {
                left.next();
            } else {
                right.next();
            }
        }
        total
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, Interval { first, last }) in self.0.iter().enumerate() {
            if place > 0 {
                f.write_str(",")?;
            }
            match last - first {
                0 => write!(f, "{first}")?,
                1 => write!(f, "{first},{last}")?,
                _ => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_are_read_extended_and_written() {
        let mut indexes = Indexes::parse("1,3-5,9,x", 8);
        assert_eq!(indexes.to_string(), "1,3-5");
        indexes.extend([2, 7, 6]);
        assert_eq!(indexes.to_string(), "1-7");
        assert_eq!((indexes.total(), indexes.has(7), indexes.has(0)), (7, true, false));
        indexes.extend([11, 12]);
        assert_eq!(indexes.to_string(), "1-7,11,12");
        assert_eq!(indexes.first_absent(3, 20), [0, 8, 9]);
        assert_eq!(indexes.first_absent(9, 10), [0, 8, 9]);
        assert_eq!(Indexes::default().first_absent(2, 5), [0, 1]);
        assert_eq!(indexes.common(&Indexes::parse("0-2,12", 20)), 3);
        assert_eq!(Indexes::parse("0-2,4,6-9", 20).common(&Indexes::parse("1,2-7,9-12", 20)), 6);
        indexes.merge(&Indexes::parse("8-9,13", 20));
        assert_eq!(indexes.to_string(), "1-9,11-13");
        assert_eq!(Indexes::parse("0-2147483645", i32::MAX).first_absent(9, i32::MAX), [i32::MAX - 1]);
    }
}
