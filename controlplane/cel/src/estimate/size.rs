//! Sizes of values, and costs. Their arithmetic saturates.

/// The cost of reading one character, byte or element of a value.
pub(super) const READ: f64 = 0.1;

/// The cost of one character of a regular expression for each unit of the text's cost.
pub(super) const PATTERN: f64 = 0.25;

/// The smallest and the largest size of a value: characters, bytes, elements or entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) min: u64,
    pub(super) max: u64,
}

impl Size {
    pub(super) const UNKNOWN: Size = Size { min: 0, max: u64::MAX };

    pub(super) const fn exactly(size: u64) -> Size {
        Size { min: size, max: size }
    }

    pub(super) const fn at_most(max: u64) -> Size {
        Size { min: 0, max }
    }

    pub(super) fn plus(self, other: Size) -> Size {
        Size { min: self.min.saturating_add(other.min), max: self.max.saturating_add(other.max) }
    }

    pub(super) fn times(self, other: Size) -> Size {
        Size { min: self.min.saturating_mul(other.min), max: self.max.saturating_mul(other.max) }
    }

    /// The size of a value that has either of the two sizes.
    pub(super) fn union(self, other: Size) -> Size {
        Size { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// The highest cost of work on each character or element.
    pub(super) fn cost(self, factor: f64) -> u64 {
        scaled(self.max, factor)
    }
}

/// Converts a number of elements to a size.
pub(super) fn count(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// A number times a factor, rounded up. The conversion from `f64` saturates.
pub(super) fn scaled(number: u64, factor: f64) -> u64 {
    (number as f64 * factor).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_saturate_and_costs_are_rounded_up() {
        let (small, unknown) = (Size { min: 2, max: 5 }, Size::UNKNOWN);
        assert_eq!(small.plus(unknown), Size { min: 2, max: u64::MAX });
        assert_eq!(small.times(unknown), Size::UNKNOWN);
        assert_eq!(small.union(Size::exactly(1)), Size { min: 1, max: 5 });
        assert_eq!((small.cost(READ), Size::at_most(0).cost(READ), small.cost(2.0)), (1, 0, 10));
        assert_eq!(
            (scaled(u64::MAX, 2.0), scaled(3_145_726, READ), scaled(25, PATTERN)),
            (u64::MAX, 314_573, 7)
        );
    }
}
