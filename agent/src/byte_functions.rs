//! `memcpy`, `memmove`, `memcmp` and `bcmp` for static binaries with musl on x86-64. Maps with text keys and trees of
//! JSON copy and compare a few bytes at a time, millions of times a second. The functions of musl take a byte or eight
//! bytes in each step. The functions of musl took a seventh of the processor time of an API server. Here a step of a
//! comparison or a short copy has 16 bytes; longer copies use `rep movsq`.
//!
//! The linker takes a function from the C library only if the program does not define it. Copies have no loops outside
//! of assembly, and no arrays: the compiler replaces both by calls of `memcpy`. Builds without optimization use musl's.
#![allow(unsafe_code, reason = "the functions get pointers from C and from compiled code")]

use core::arch::asm;
use core::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_storeu_si128};

/// Maximum bytes that are copied without a loop.
const SHORT: usize = 128;
/// Bytes of a step.
const STEP: usize = size_of::<__m128i>();

#[cfg(not(any(test, debug_assertions)))]
mod exported {
    /// Copies `count` bytes between areas that do not overlap.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of C's function.
        unsafe { super::copy(to, from, count) };
        to
    }

    /// Copies `count` bytes between areas that may overlap.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of C's function.
        unsafe { super::copy_within(to, from, count) };
        to
    }

    /// Compares `count` bytes: negative, zero or positive.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcmp(one: *const u8, two: *const u8, count: usize) -> i32 {
        // SAFETY: the caller keeps the contract of C's function.
        unsafe { super::compare(one, two, count) }
    }

    /// Zero if the areas are equal.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn bcmp(one: *const u8, two: *const u8, count: usize) -> i32 {
        // SAFETY: the caller keeps the contract of C's function.
        unsafe { super::compare(one, two, count) }
    }
}

/// Copies between areas that do not overlap.
#[inline(always)]
unsafe fn copy(to: *mut u8, from: *const u8, count: usize) {
    if count <= SHORT {
        // SAFETY: the caller guarantees both areas.
        unsafe { copy_short(to, from, count) };
        return;
    }
    // SAFETY: both areas have more than one step. The last step overlaps the previous step.
    unsafe {
        let last = load(from.add(count - STEP));
        copy_words(to, from, count / size_of::<u64>());
        store(to.add(count - STEP), last);
    }
}

/// Copies between areas that may overlap.
#[inline(always)]
unsafe fn copy_within(to: *mut u8, from: *const u8, count: usize) {
    if count <= SHORT {
        // SAFETY: the caller guarantees both areas; a short copy loads all bytes before it stores a byte.
        unsafe { copy_short(to, from, count) };
    } else if to.addr().wrapping_sub(from.addr()) >= count {
        // Forwards: the destination does not begin inside the source.
        // SAFETY: the last step is loaded before a word is stored, and a word is stored after it was read.
        unsafe { copy(to, from, count) };
    } else {
        // SAFETY: the caller guarantees both areas; the steps go backwards, and the first one is loaded before them.
        unsafe {
            let first = load(from);
            copy_backwards(to, from, count);
            store(to, first);
        }
    }
}

/// Copies at most [`SHORT`] bytes. All bytes are loaded before the first one is stored.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, count: usize) {
    // SAFETY: each branch accesses a part at the start and a part at the end, and `count` is at least the size of each.
    unsafe {
        match count {
            0 => {}
            1 => to.write(from.read()),
            2..=3 => copy_ends::<u16>(to, from, count),
            4..=7 => copy_ends::<u32>(to, from, count),
            8..=16 => copy_ends::<u64>(to, from, count),
            17..=32 => {
                let ends = (load(from), load(from.add(count - STEP)));
                store(to, ends.0);
                store(to.add(count - STEP), ends.1);
            }
            33..=64 => copy_four_steps(to, from, count),
            _ => copy_eight_steps(to, from, count),
        }
    }
}

/// Copies the first and the last `T` of `count` bytes.
#[inline(always)]
unsafe fn copy_ends<T: Copy>(to: *mut u8, from: *const u8, count: usize) {
    let end = count - size_of::<T>();
    // SAFETY: the caller guarantees at least one `T` in both areas.
    unsafe {
        let (first, last) = (from.cast::<T>().read_unaligned(), from.add(end).cast::<T>().read_unaligned());
        to.cast::<T>().write_unaligned(first);
        to.add(end).cast::<T>().write_unaligned(last);
    }
}

/// Copies 33 to 64 bytes.
#[inline(always)]
unsafe fn copy_four_steps(to: *mut u8, from: *const u8, count: usize) {
    let end = count - 2 * STEP;
    // SAFETY: the caller guarantees two steps in both areas.
    unsafe {
        let first = (load(from), load(from.add(STEP)));
        let last = (load(from.add(end)), load(from.add(end + STEP)));
        store(to, first.0);
        store(to.add(STEP), first.1);
        store(to.add(end), last.0);
        store(to.add(end + STEP), last.1);
    }
}

/// Copies 65 to 128 bytes.
#[inline(always)]
unsafe fn copy_eight_steps(to: *mut u8, from: *const u8, count: usize) {
    let (half, end) = (2 * STEP, count - 4 * STEP);
    // SAFETY: the caller guarantees four steps in both areas.
    unsafe {
        let first = (load(from), load(from.add(STEP)), load(from.add(half)), load(from.add(half + STEP)));
        let from = from.add(end);
        let last = (load(from), load(from.add(STEP)), load(from.add(half)), load(from.add(half + STEP)));
        store(to, first.0);
        store(to.add(STEP), first.1);
        store(to.add(half), first.2);
        store(to.add(half + STEP), first.3);
        let to = to.add(end);
        store(to, last.0);
        store(to.add(STEP), last.1);
        store(to.add(half), last.2);
        store(to.add(half + STEP), last.3);
    }
}

/// Copies words of eight bytes forwards.
#[inline(always)]
unsafe fn copy_words(to: *mut u8, from: *const u8, words: usize) {
    // SAFETY: the caller guarantees both areas; the direction flag is clear in all compiled code.
    unsafe {
        asm!("rep movsq", inout("rcx") words => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
}

/// Copies whole steps from the end backwards, until less than a step remains at the start.
#[inline(always)]
unsafe fn copy_backwards(to: *mut u8, from: *const u8, count: usize) {
    // SAFETY: the caller guarantees at least one step, and both areas.
    unsafe {
        asm!(
            "2:",
            "movdqu {step}, [{from} + {left} - 16]",
            "movdqu [{to} + {left} - 16], {step}",
            "sub {left}, 16",
            "cmp {left}, 16",
            "jae 2b",
            step = out(xmm_reg) _, left = inout(reg) count => _, from = in(reg) from, to = in(reg) to,
            options(nostack),
        );
    }
}

/// Compares bytes. Returns the difference of the first pair of bytes that differ.
#[inline(always)]
unsafe fn compare(one: *const u8, two: *const u8, count: usize) -> i32 {
    let mut at = 0;
    // SAFETY: every access is below `count`, and the caller guarantees both areas.
    unsafe {
        while count - at >= STEP {
            let equal = _mm_movemask_epi8(_mm_cmpeq_epi8(load(one.add(at)), load(two.add(at))));
            if equal != 0xffff {
                return difference(one, two, at + equal.trailing_ones() as usize);
            }
            at += STEP;
        }
        if count - at >= size_of::<u64>() {
            match words(one, two, at) {
                0 => at += size_of::<u64>(),
                differing => return difference(one, two, at + differing.trailing_zeros() as usize / 8),
            }
        }
        while at < count {
            if one.add(at).read() != two.add(at).read() {
                return difference(one, two, at);
            }
            at += 1;
        }
    }
    0
}

/// The bits in which the words at `at` differ.
#[inline(always)]
unsafe fn words(one: *const u8, two: *const u8, at: usize) -> u64 {
    // SAFETY: the caller guarantees eight bytes in both areas.
    unsafe { one.add(at).cast::<u64>().read_unaligned() ^ two.add(at).cast::<u64>().read_unaligned() }
}

/// The difference of the bytes at `at`.
#[inline(always)]
unsafe fn difference(one: *const u8, two: *const u8, at: usize) -> i32 {
    // SAFETY: the caller guarantees the byte in both areas.
    unsafe { i32::from(one.add(at).read()) - i32::from(two.add(at).read()) }
}

#[inline(always)]
unsafe fn load(from: *const u8) -> __m128i {
    // SAFETY: the caller guarantees a step; the intrinsic needs no alignment.
    unsafe { _mm_loadu_si128(from.cast()) }
}

#[inline(always)]
unsafe fn store(to: *mut u8, step: __m128i) {
    // SAFETY: the caller guarantees a step; the intrinsic needs no alignment.
    unsafe { _mm_storeu_si128(to.cast(), step) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than all limits, and not a multiple of a step.
    const MAX_LENGTH: usize = 300;

    fn pattern() -> Vec<u8> {
        (0..2 * MAX_LENGTH + 64).map(|at| u8::try_from((at * 7 + at / 256) % 251).unwrap()).collect()
    }

    #[test]
    fn copies_have_the_bytes_and_change_no_other_byte() {
        let from = pattern();
        for count in 0..=MAX_LENGTH {
            for shift in [0, 1, 7, 15] {
                let mut to = vec![0xee; MAX_LENGTH + 64];
                // SAFETY: both vectors are longer than the largest shift and count together.
                unsafe { copy(to.as_mut_ptr().add(16 + shift), from.as_ptr().add(shift), count) };
                let (before, rest) = to.split_at(16 + shift);
                assert_eq!(&rest[..count], &from[shift..shift + count], "{count} bytes");
                assert!(before.iter().chain(&rest[count..]).all(|byte| *byte == 0xee), "{count} bytes");
            }
        }
    }

    #[test]
    fn overlapping_areas_are_copied_in_both_directions() {
        for count in 0..=MAX_LENGTH {
            for distance in [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 127, 200, 299] {
                for (from, to) in [(32, 32 + distance), (32 + distance, 32)] {
                    let (mut ours, mut expected) = (pattern(), pattern());
                    expected.copy_within(from..from + count, to);
                    let start = ours.as_mut_ptr();
                    // SAFETY: offset, distance and count are together less than the vector's length.
                    unsafe { copy_within(start.add(to), start.add(from), count) };
                    assert_eq!(ours, expected, "{count} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn comparisons_order_by_the_first_differing_byte() {
        let one = pattern();
        for count in 0..=MAX_LENGTH {
            // SAFETY: both areas have `count` bytes.
            assert_eq!(unsafe { compare(one.as_ptr(), one.clone().as_ptr(), count) }, 0, "{count} bytes");
            for at in 0..count {
                let mut two = one.clone();
                two[at] = two[at].wrapping_add(0x80);
                // Later differences, and differences after the end, have no effect.
                two[at + 1..count].fill(0);
                two[count] ^= 0xff;
                let expected = one[..count].cmp(&two[..count]);
                // SAFETY: both areas have `count` bytes.
                let found = unsafe { compare(one.as_ptr(), two.as_ptr(), count) };
                assert_eq!(found.cmp(&0), expected, "{count} bytes, byte {at}");
            }
        }
    }
}
