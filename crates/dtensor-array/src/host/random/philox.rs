//! The generator: Philox 4×32-10 by Salmon, Moraes, Dror and Shaw ("Parallel random numbers: as easy as 1, 2, 3").

/// The number of blocks computed together, one in each vector lane.
const LANES: usize = 16;
/// The number of elements generated at a time.
pub(super) const CHUNK: usize = 64;
/// The number of elements generated at a time if only a few are needed.
pub(super) const FEW: usize = 4;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The identity of one random draw. It and the index of an element determine the element.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Draw {
    /// The key.
    pub seed: u64,
    /// The upper half of the counter.
    pub stream: u64,
}

/// Computes one block of Philox 4×32-10.
#[inline(always)]
pub(super) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let a = u64::from(c0) * u64::from(MULTIPLIERS[0]);
        let b = u64::from(c2) * u64::from(MULTIPLIERS[1]);
        (c0, c1, c2, c3) = ((b >> 32) as u32 ^ c1 ^ k0, b as u32, (a >> 32) as u32 ^ c3 ^ k1, a as u32);
        k0 = k0.wrapping_add(KEY_STEPS[0]);
        k1 = k1.wrapping_add(KEY_STEPS[1]);
    }
    [c0, c1, c2, c3]
}

impl Draw {
    /// Returns the `n`-th 64-bit word.
    pub fn word(self, n: u64) -> u64 {
        self.pairs(n / 2)[(n % 2) as usize]
    }

    /// Returns the words of the blocks `first..first + LANES` in pairs: first the pairs of words 0 and 1, then of words 2 and 3.
    #[inline(always)]
    fn blocks(self, first: u64) -> [[u64; LANES]; 2] {
        // Lanes are 64 bits wide and their upper halves are ignored, because vector units multiply 32-bit words this way.
        const LOW: u64 = u32::MAX as u64;
        let [mut c0, mut c1] = [[0; LANES]; 2];
        for lane in 0..LANES {
            c0[lane] = first.wrapping_add(lane as u64);
            c1[lane] = c0[lane] >> 32;
        }
        let mut c2 = [self.stream; LANES];
        let mut c3 = [self.stream >> 32; LANES];
        let (mut k0, mut k1) = (self.seed as u32, (self.seed >> 32) as u32);
        for _ in 0..ROUNDS {
            for lane in 0..LANES {
                let a = (c0[lane] & LOW) * u64::from(MULTIPLIERS[0]);
                let b = (c2[lane] & LOW) * u64::from(MULTIPLIERS[1]);
                c0[lane] = (b >> 32) ^ c1[lane] ^ u64::from(k0);
                c1[lane] = b;
                c2[lane] = (a >> 32) ^ c3[lane] ^ u64::from(k1);
                c3[lane] = a;
            }
            k0 = k0.wrapping_add(KEY_STEPS[0]);
            k1 = k1.wrapping_add(KEY_STEPS[1]);
        }
        for lane in 0..LANES {
            c0[lane] = (c0[lane] & LOW) | (c1[lane] << 32);
            c2[lane] = (c2[lane] & LOW) | (c3[lane] << 32);
        }
        [c0, c2]
    }

    /// Returns the words of the blocks `block..block + LANES`, in order and in pairs.
    #[inline(always)]
    pub(super) fn pairs(self, block: u64) -> [u64; CHUNK / 2] {
        let [a, b] = self.blocks(block);
        let mut out = [0; CHUNK / 2];
        for lane in 0..LANES {
            out[2 * lane] = a[lane];
            out[2 * lane + 1] = b[lane];
        }
        out
    }

    /// Returns one 64-bit word for each of `CHUNK` elements, starting at `block`.
    #[inline(always)]
    pub(super) fn wide_words(self, block: u64) -> [u64; CHUNK] {
        let mut out = [0; CHUNK];
        for half in 0..2 {
            let pairs = self.pairs(block.wrapping_add((half * LANES) as u64));
            out[half * CHUNK / 2..][..CHUNK / 2].copy_from_slice(&pairs);
        }
        out
    }

    /// Returns the words of one block.
    #[inline(always)]
    pub(super) fn few_words(self, block: u64) -> [u32; FEW] {
        let counter = [block as u32, (block >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        philox(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }

    /// Returns the words of one block in pairs.
    #[inline(always)]
    pub(super) fn few_pairs(self, block: u64) -> [u64; FEW / 2] {
        let words = self.few_words(block).map(u64::from);
        [words[0] | words[1] << 32, words[2] | words[3] << 32]
    }

    /// Returns one 64-bit word for each of `FEW` elements, starting at `block`.
    #[inline(always)]
    pub(super) fn few_wide_words(self, block: u64) -> [u64; FEW] {
        let ([a, b], [c, d]) = (self.few_pairs(block), self.few_pairs(block.wrapping_add(1)));
        [a, b, c, d]
    }

    /// Returns one 32-bit word for each of `CHUNK` elements, starting at `block`.
    #[inline(always)]
    pub(super) fn words(self, block: u64) -> [u32; CHUNK] {
        let mut words = self.pairs(block);
        if cfg!(target_endian = "big") {
            words = words.map(|word| word.rotate_left(32));
        }
        // SAFETY: both arrays are plain integers and have the same size. The lower halves come first.
        unsafe { std::mem::transmute(words) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([!0; 4], [!0; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(philox(pi, [0xa4093822, 0x299f31d0]), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn lanes_are_blocks() {
        let draw = Draw { seed: 0x0123_4567_89ab_cdef, stream: 0xfedc_ba98_7654_3210 };
        // These blocks cross the overflow of the counter's low word.
        let first = u64::from(u32::MAX) - 5;
        let [a, b] = draw.blocks(first);
        for lane in 0..LANES {
            let block = first + lane as u64;
            assert_eq!(draw.few_pairs(block), [a[lane], b[lane]]);
            let counter =
                [block as u32, (block >> 32) as u32, draw.stream as u32, (draw.stream >> 32) as u32];
            let expected = philox(counter, [draw.seed as u32, (draw.seed >> 32) as u32]);
            let words = [a[lane] as u32, (a[lane] >> 32) as u32, b[lane] as u32, (b[lane] >> 32) as u32];
            assert_eq!(words, expected);
        }
    }
}
