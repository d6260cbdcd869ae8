//! The training text, and batches of it.

use std::borrow::Cow;
use std::path::Path;

use dtensor::{Device, Generator, Result, Tensor, on_device};

/// "Persuasion", by Jane Austen: see `data/README.md`.
const BOOK: &[u8] = include_bytes!("../../data/persuasion.txt");

/// The largest number of sequences used for validation.
const VALIDATED: usize = 64;

/// A text. Its last tenth is held out for validation.
pub(crate) struct Text {
    pub(crate) name: String,
    bytes: Cow<'static, [u8]>,
    /// The index at which the held-out tenth begins.
    held_out: usize,
    /// The length of a sequence.
    seq: usize,
}

/// A batch of sequences. Each row has one byte more than a sequence, for the last target.
pub(crate) struct Batch {
    rows: Vec<Vec<u8>>,
}

impl Text {
    /// Reads a file, or takes the built-in book, for sequences of `seq` bytes.
    pub(crate) fn read(file: Option<&Path>, seq: usize) -> std::result::Result<Text, String> {
        let (name, bytes) = match file {
            None => ("\"Persuasion\" by Jane Austen".to_owned(), Cow::Borrowed(BOOK)),
            Some(file) => {
                let name = file.display().to_string();
                let bytes = std::fs::read(file).map_err(|error| format!("--text {name}: {error}"))?;
                (name, Cow::Owned(bytes))
            }
        };
        let held_out = bytes.len() - bytes.len() / 10;
        if bytes.len() / 10 <= seq {
            let (len, needed) = (bytes.len(), seq.saturating_add(1).saturating_mul(10));
            return Err(format!(
                "the text has {len} bytes, but --seq {seq} needs at least {needed}, because a tenth is held out"
            ));
        }
        Ok(Text { name, bytes, held_out, seq })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Draws sequences that begin anywhere in the training part. Ranks with equal generators draw the same.
    pub(crate) fn draw(&self, batch: usize, generator: &mut Generator) -> Result<Batch> {
        let last = self.held_out - self.seq - 1;
        // In main memory, because they are read at once.
        let draw = || Tensor::randint_with(0, last as i64 + 1, [batch], generator);
        let starts = on_device(Device::Cpu, draw)?.to_vec::<i64>()?;
        Ok(Batch { rows: starts.into_iter().map(|start| self.row(start as usize)).collect() })
    }

    /// Returns sequences spread evenly over the held-out part.
    pub(crate) fn validation(&self) -> Batch {
        let available = (self.bytes.len() - self.held_out - 1) / self.seq;
        let count = available.min(VALIDATED);
        let start = |i: usize| self.held_out + i * available / count * self.seq;
        Batch { rows: (0..count).map(|i| self.row(start(i))).collect() }
    }

    fn row(&self, start: usize) -> Vec<u8> {
        self.bytes[start..=start + self.seq].to_vec()
    }
}

impl Batch {
    pub(crate) fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of target bytes.
    pub(crate) fn targets(&self) -> usize {
        self.rows.iter().map(|row| row.len() - 1).sum()
    }

    /// Returns slice `index` of `count` slices, whose sizes differ by at most one row.
    pub(crate) fn slice(&self, index: usize, count: usize) -> Batch {
        let bound = |index: usize| index * self.rows.len() / count;
        Batch { rows: self.rows[bound(index)..bound(index + 1)].to_vec() }
    }

    /// Returns the input bytes and the target bytes, each of shape `[rows, length]`.
    pub(crate) fn tensors(&self) -> Result<(Tensor, Tensor)> {
        let length = self.rows.first().map_or(0, |row| row.len() - 1);
        let from = |start: usize| {
            let bytes = self.rows.iter().flat_map(|row| &row[start..start + length]);
            Tensor::from_vec(bytes.map(|&byte| byte as i64).collect(), [self.rows.len(), length])
        };
        Ok((from(0)?, from(1)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_book_is_complete_ascii_text() {
        assert!(BOOK.starts_with(b"Persuasion\n") && BOOK.ends_with(b"Finis\n"));
        assert!(BOOK.is_ascii());
    }

    #[test]
    fn training_and_validation_use_separate_parts_of_the_text() {
        let file = std::env::temp_dir().join(format!("dtensor-text-{}", std::process::id()));
        std::fs::write(&file, (0..=254u8).collect::<Vec<_>>()).unwrap();
        let text = Text::read(Some(&file), 8).unwrap();
        std::fs::remove_file(file).unwrap();
        assert_eq!((text.len(), text.held_out), (255, 230));
        let batch = text.draw(5000, &mut Generator::new(1)).unwrap();
        let bytes: Vec<u8> = batch.rows.concat();
        assert_eq!((bytes.iter().min(), bytes.iter().max()), (Some(&0), Some(&229)));
        let again = text.draw(5000, &mut Generator::new(1)).unwrap();
        assert_eq!(again.rows, batch.rows);
        let (inputs, targets) = batch.slice(1, 3).tensors().unwrap();
        assert_eq!((inputs.dims(), targets.dims()), (&[1667, 8][..], &[1667, 8][..]));
        assert_eq!(inputs.add(1).unwrap().to_vec::<i64>().unwrap(), targets.to_vec::<i64>().unwrap());
        assert_eq!((0..3).map(|i| batch.slice(i, 3).rows()).sum::<usize>(), 5000);

        let held_out = text.validation();
        assert_eq!(held_out.rows.iter().map(|row| row[0]).collect::<Vec<_>>(), [230, 238, 246]);
        assert_eq!(held_out.targets(), 24);
        let error = Text::read(Some(Path::new("/nonexistent")), 8).err().unwrap();
        assert!(error.starts_with("--text /nonexistent: "), "{error}");
    }
}
