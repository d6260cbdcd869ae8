//! [`Checksum`]: a checksum of a tensor that ranks compute shard by shard.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// Two wrapping sums over the elements of a tensor: of their bits, and of their bits times their position.
///
/// Each rank sums the elements that it holds. The sums of all ranks add up to the checksum of the full tensor, whatever its
/// layout, so no rank needs to see all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) struct Checksum {
    sum: u64,
    weighted: u64,
}

const LANES: usize = 8;

impl Checksum {
    /// Computes the checksum of consecutive elements of `size` bytes each. `first` is the position of the first one in its tensor.
    pub(super) fn of(bytes: &[u8], size: usize, first: u64) -> Checksum {
        let local = match size {
            1 => sums::<1>(bytes, |[b]| b.into()),
            2 => sums::<2>(bytes, |b| u16::from_le_bytes(b).into()),
            4 => sums::<4>(bytes, |b| u32::from_le_bytes(b).into()),
            _ => sums::<8>(bytes, u64::from_le_bytes),
        };
        Checksum { weighted: local.weighted.wrapping_add(first.wrapping_mul(local.sum)), ..local }
    }

    /// Computes the checksum of a text or of a file's header.
    pub(super) fn of_bytes(bytes: &[u8]) -> Checksum {
        Checksum::of(bytes, 1, 0)
    }
}

/// Computes the sums of elements of `N` bytes; the first one has position 0 and weight 1. Several lanes run side by side: each adds
/// up its elements, and its running sums, from which the weighted sum follows without a multiplication per element.
fn sums<const N: usize>(bytes: &[u8], word: impl Fn([u8; N]) -> u64) -> Checksum {
    let (mut sum, mut running) = ([0u64; LANES], [0u64; LANES]);
    let (elements, _) = bytes.as_chunks::<N>();
    let (blocks, rest) = elements.as_chunks::<LANES>();
    for block in blocks {
        for ((&bytes, sum), running) in block.iter().zip(&mut sum).zip(&mut running) {
            *sum = sum.wrapping_add(word(bytes));
            *running = running.wrapping_add(*sum);
        }
    }
    let (count, mut total) = (blocks.len() as u64, Checksum::default());
    for (lane, (sum, running)) in sum.into_iter().zip(running).enumerate() {
        // `running` counts block k of `count` as often as `count - k`.
        let by_block = count.wrapping_mul(sum).wrapping_sub(running);
        let weighted =
            (LANES as u64).wrapping_mul(by_block).wrapping_add((lane as u64 + 1).wrapping_mul(sum));
        total += Checksum { sum, weighted };
    }
    for (i, &bytes) in rest.iter().enumerate() {
        let weight = (blocks.len() * LANES + i + 1) as u64;
        total += Checksum { sum: word(bytes), weighted: weight.wrapping_mul(word(bytes)) };
    }
    total
}

impl AddAssign for Checksum {
    fn add_assign(&mut self, other: Checksum) {
        self.sum = self.sum.wrapping_add(other.sum);
        self.weighted = self.weighted.wrapping_add(other.weighted);
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.sum, self.weighted)
    }
}

impl From<Checksum> for String {
    fn from(checksum: Checksum) -> String {
        checksum.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let word = |range| text.get(range).and_then(|digits| u64::from_str_radix(digits, 16).ok());
        match (text.len(), word(0..16), word(16..32)) {
            (32, Some(sum), Some(weighted)) => Ok(Checksum { sum, weighted }),
            _ => Err(format!("{text:?} is not a checksum")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn naive(bytes: &[u8], size: usize, first: u64) -> Checksum {
        let mut total = Checksum::default();
        for (i, element) in bytes.chunks_exact(size).enumerate() {
            let word = element.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
            total += Checksum { sum: word, weighted: word.wrapping_mul(first + i as u64 + 1) };
        }
        total
    }

    #[test]
    fn the_sums_of_pieces_add_up_to_that_of_the_tensor() {
        let bytes: Vec<u8> = (0..8 * 77u32).map(|i| ((i * i * 31) >> 3) as u8).collect();
        for size in [1, 2, 4, 8] {
            let full = Checksum::of(&bytes, size, 0);
            assert_eq!(full, naive(&bytes, size, 0));
            for at in [0, 1, 7, 8, 9, 40, 77] {
                let (a, b) = bytes.split_at(at * size);
                let mut sum = Checksum::of(b, size, at as u64);
                sum += Checksum::of(a, size, 0);
                assert_eq!(sum, full, "{size} bytes, split at {at}");
            }
            assert_eq!(Checksum::try_from(full.to_string()), Ok(full));
        }
    }

    #[test]
    fn every_flipped_bit_and_every_swap_changes_the_checksum() {
        let bytes: Vec<u8> = (0..96).collect();
        let full = Checksum::of(&bytes, 4, 0);
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Checksum::of(&other, 4, 0), full);
        }
        for at in 0..bytes.len() - 4 {
            let mut other = bytes.clone();
            other.swap(at, at + 4);
            assert_ne!(Checksum::of(&other, 4, 0), full);
        }
    }
}
