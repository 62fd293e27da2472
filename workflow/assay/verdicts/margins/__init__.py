"""Token margins by teacher forcing: floor, gates and controls that every modality with judged tokens shares."""
